"""Bytes of tokens: what each adds to a text, perhaps a part of a character."""

from __future__ import annotations

import codecs
import re
from functools import cached_property

from tokenizers import Tokenizer as Core

NAMED_BYTES = "triforce.named_bytes"
"""Name of how errors of decoding are handled: a byte of no character is written as SentencePiece names it, `<0xF0>`."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Bytes of the tokens of one tokenizer. Its table of added tokens, of which some have thousands, is read once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.falls_back = core.token_to_id("<0x0A>") is not None
        """Whether characters without a token are written as tokens of their bytes, as SentencePiece does it."""

    def of(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token: of an added or special one its name; none of an unknown id."""
        if token_id in self._added:
            return self._added[token_id]
        read = _sentencepiece if self.falls_back else _byte_level
        return read(self._core.id_to_token(token_id) or "")

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are marks and no text."""
        return self._tables[1]

    @property
    def _added(self) -> dict[int, bytes]:
        return self._tables[0]

    @cached_property
    def _tables(self) -> tuple[dict[int, bytes], frozenset[int]]:
        added = self._core.get_added_tokens_decoder()
        special_ids = frozenset(i for i, token in added.items() if token.special)
        return {i: str(token.content).encode() for i, token in added.items()}, special_ids


def _named_bytes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(f"<0x{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(NAMED_BYTES, _named_bytes)


def _byte_level(token: str) -> bytes:
    return bytes([_BYTES[c] for c in token]) if all(c in _BYTES for c in token) else token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes a printable byte of latin-1 as itself, and the others, in order, from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_alphabet()
