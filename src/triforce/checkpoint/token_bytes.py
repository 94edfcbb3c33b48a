"""What one token is, byte by byte: a token may be a part of a character, which its text alone does not show."""

from __future__ import annotations

import re

from tokenizers import Tokenizer as Core

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(core: Core, token_id: int) -> bytes:
    """The UTF-8 bytes that a token adds to a text; of an added or special token its name."""
    return all_token_bytes(core, range(token_id, token_id + 1))[0]


def all_token_bytes(core: Core, ids: range) -> list[bytes]:
    """The same of many tokens; nothing for an id that does not exist."""
    added, falls_back_to_bytes = core.get_added_tokens_decoder(), core.token_to_id("<0x0A>") is not None
    read = _sentencepiece if falls_back_to_bytes else _byte_level
    return [str(added[i].content).encode() if i in added else read(core.id_to_token(i) or "") for i in ids]


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
