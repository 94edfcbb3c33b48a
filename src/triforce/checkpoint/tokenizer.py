"""Text to token ids and back, through the `tokenizers` library: complete texts, streams, and bytes of tokens."""

from __future__ import annotations

import codecs
import filecmp
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core
from tokenizers.decoders import DecodeStream

from triforce.checkpoint.control_tokens import ControlTokens, HiddenTokens, end_mark
from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.template_process import render_isolated
from triforce.checkpoint.tokenizer_files import CORE, TokenizerFiles, read_tokenizer
from triforce.errors import ModelError, RequestError, argument
from triforce.interface.messages import Message, ends_in_answer, read_messages, read_tools, told_in_text

NAMED_BYTES = "triforce.named_bytes"
"""Name of a decoding error handler: a byte outside any character becomes its SentencePiece name, such as `<0xF0>`."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Bytes of one tokenizer's tokens. Its table of added tokens, sometimes thousands, is read once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.byte_fallback = core.token_to_id("<0x0A>") is not None
        """Whether characters without a token become tokens of their bytes, as in SentencePiece."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's UTF-8 bytes. For an added or special token: its name. For an unknown id: no bytes."""
        if token_id in self._added:
            return self._added[token_id]
        decode = _sentencepiece if self.byte_fallback else _byte_level
        return decode(self._core.id_to_token(token_id) or "")

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which mark structure and are not text."""
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
    """Return the byte of each character of byte-level BPE.

    A printable byte of latin-1 stands for itself. The others follow, in order, from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


DECODE_CONTEXT = 16  # preceding tokens that can change the text of the next one
_COMPOSING = re.compile(r"\b(?:join|lower|partition|replace|reverse|split\w*|striptags|upper)\b")
"""Names of what a template may make other text of people's text with."""
PANIC = "PanicException"
"""Type name of a Rust panic, which is no Exception and cannot be imported."""
SCANNED_ROWS = 1 << 16
"""Last rows of the embedding that are searched for the highest token id, before all tokens are listed."""
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would be missing after a fork


def same_tokenizer(folder: Path, other_folder: Path) -> bool:
    """Return whether both folders have the same tokenizer.json. Two loaded copies would take twice the memory."""
    file = folder / CORE
    other_file = other_folder / CORE
    return file.is_file() and other_file.is_file() and filecmp.cmp(file, other_file, shallow=False)


class Tokenizer:
    """A tokenizer. Ids from `vocab_size` on do not exist, even if the files have them.

    Attributes:

    - vocab_size: highest token id plus 1, added tokens included.
    - eos_ids: end-of-sequence token ids of the model's files.
    - templates: chat templates by name; empty without one.
    - control_tokens: its special tokens, which text by people never becomes in a chat.
    """

    def __init__(self, files: TokenizerFiles, eos_ids: frozenset[int], rows: int | None = None) -> None:
        """rows: rows of the model's embedding (None: no limit)."""
        self._core = files.core
        self._special = files.special
        self.templates = files.templates
        # Some tokenizer.json switch on truncation or padding, which would cut or pad every prompt.
        self._core.no_truncation()
        self._core.no_padding()
        self._rows = rows
        self._bytes = TokenBytes(self._core)
        self.control_tokens = ControlTokens(self._core)
        self.vocab_size = self._last_id() + 1
        """Highest id + 1, added tokens included."""
        eos_id = self._core.token_to_id(self._special.get("eos_token", ""))
        candidate_ids = (i for i in (*eos_ids, eos_id) if i is not None and 0 <= i < self.vocab_size)
        self.eos_ids = frozenset(i for i in candidate_ids if self._core.id_to_token(i) is not None)

    @classmethod
    def load(cls, path: Path, rows: int | None = None) -> Tokenizer:
        """Load the tokenizer of a model's folder. Raises ModelError."""
        return cls(read_tokenizer(path), configured_eos_ids(path), rows)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return token ids. Raises RequestError.

        add_special: with the model's special tokens, such as BOS. parse_special: whether a special token that the text
        spells is a token; else it is text.
        """
        core = self._core if parse_special else self.control_tokens.plain_core
        return self._known(_encode(core, text, add_special))

    def _known(self, ids: list[int]) -> list[int]:
        """Return ids that the model has an embedding for. Raises RequestError."""
        if ids and (highest_id := max(ids)) >= self.vocab_size:
            raise RequestError(
                f"the text holds token {highest_id}, which this model has no embedding for; leave it out"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens, equal to the joined pieces of `stream`."""
        if not self._bytes.byte_fallback:
            return str(self._core.decode(list(ids), skip_special_tokens=True))
        stream = self.stream()
        return "".join([stream.step(i) for i in ids]) + stream.flush()

    def stream(self, prefix_ids: Sequence[int] = (), token_texts: Mapping[int, str] | None = None) -> TextStream:
        """Return a stream of text for arriving tokens. After `prefix_ids`, the first token keeps its space.

        token_texts: texts by id of tokens that are shown with another text than their own, or none.
        """
        spelled = {i: "" if i in self.special_ids else self.text_of(i) for i in token_texts or ()}
        return TextStream(self._core, prefix_ids, {i: (spelled[i], text) for i, text in (token_texts or {}).items()})

    def ids_of_names(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ids of those texts that are one token each, such as marks of structure."""
        ids = {name: self._core.token_to_id(name) for name in names}
        return {name: i for name, i in ids.items() if i is not None and i < self.vocab_size and self.text_of(i) == name}

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes in a text, perhaps a part of a character; no bytes for an unknown id."""
        return self._bytes.bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        """Return a single token as text. Bytes of incomplete characters are written as `<0xF0>`."""
        return self._bytes.bytes_of(token_id).decode(errors=NAMED_BYTES)

    def all_bytes(self) -> list[bytes]:
        """Return `bytes_of` of every id below `vocab_size`."""
        return [self._bytes.bytes_of(i) for i in range(self.vocab_size)]

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which mark structure and are not text."""
        return self._bytes.special_ids

    @property
    def chats(self) -> bool:
        """Whether `chat` has a template."""
        return bool(self.templates)

    @property
    def template(self) -> str:
        """The chat template, or all of them joined; empty if there is none."""
        return "\n".join(self.templates.values())

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = True,
    ) -> list[int]:
        """Return token ids of a conversation up to the next answer (see `interface.messages`), with its tools.

        variables: of the template, such as `enable_thinking`. continue_final: whether the answer continues a last turn
        of the assistant, in place of a new turn behind it. Control tokens are the template's only: where a text of
        the messages, tools or variables spells one, it stays text. Raises RequestError.
        """
        if not self.templates:
            raise RequestError(
                f"this model has no chat template; give a text to generate, or name one by {argument('chat_template')}"
            )
        turns = read_messages(messages, self.template)
        continued = continue_final and ends_in_answer(turns)
        mark = ""
        if continued:
            mark = end_mark([turns, list(tools or ()), variables or {}])
            turns[-1] = turns[-1] | {"content": turns[-1]["content"] + mark}
        tool_schemas = read_tools(tools or ())
        has_calls = any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns)
        if "tool" not in self.template and (tool_schemas or has_calls):
            turns = told_in_text(turns, tool_schemas)
            tool_schemas = []
        written = {**(variables or {}), "messages": turns, "tools": tool_schemas or None}
        try:
            hidden = self.control_tokens.hidden_in(written)
            text = self._rendered(written, hidden, mark)
            if _COMPOSING.search(self.template):  # what a template cuts out may join parts of a control token
                parts = self.control_tokens.hidden_parts_in(written)
                parts_text = self._rendered(written, parts, mark)
                if self.control_tokens.written_in(text) != self.control_tokens.written_in(parts_text):
                    hidden, text = parts, parts_text
        except (RequestError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the model's chat template does not accept these messages: {error}") from error
        if not hidden:
            return self.encode(text, add_special=False)
        return self._known(self.control_tokens.encode(text, hidden, _encode))

    def _rendered(self, written: Mapping[str, Any], hidden: HiddenTokens, mark: str) -> str:
        """Return the template's output. mark: the end of a turn that is continued; empty without one.

        The output then ends where the mark stands last. Raises RequestError.
        """
        settings = {"documents": None, "add_generation_prompt": not mark}
        template = self._template_for(written["tools"])
        text = render_isolated(template, json.dumps({**hidden.replaced(written), **settings, **self._special}))
        if not mark:
            return text
        for shown_mark in (mark, json.dumps(mark)[1:-1]):
            head, separator, _ = text.rpartition(shown_mark)
            if separator:
                return head.replace(shown_mark, "")  # a template may show a turn twice
        raise RequestError("it drops the last turn of the assistant, so no answer can continue it")

    def _template_for(self, tools: object) -> str:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise RequestError(f"no template is called default, only {', '.join(self.templates)}")
        return self.templates[name]

    @cached_property
    def _tokens(self) -> dict[int, str]:
        rows = self._rows
        return {i: token for token, i in self._core.get_vocab().items() if rows is None or i < rows}

    def _last_id(self) -> int:
        """Return the highest id. Raises ModelError if there is none."""
        if self._rows is not None:  # listing all tokens of a large vocabulary is slow
            row_count = min(self._rows, 1 << 32)
            for i in range(row_count - 1, max(row_count - SCANNED_ROWS, 0) - 1, -1):
                if self._core.id_to_token(i) is not None:
                    return i
        if not self._tokens:
            raise ModelError("the tokenizer has no token that the model has an embedding for; download it again")
        return max(self._tokens)

    def require_same_vocabulary(self, other: Tokenizer, names: tuple[str, str]) -> None:
        """Raise ModelError unless every id is the same token in both. names: of this model and of the other."""
        if self._tokens == other._tokens:
            return
        for i in range(max(self.vocab_size, other.vocab_size)):
            own_token = self._tokens.get(i)
            other_token = other._tokens.get(i)
            if own_token != other_token:
                raise ModelError(
                    f"{names[0]} and {names[1]} do not share a vocabulary: token {i} is {own_token!r} in the first and "
                    f"{other_token!r} in the second; use a draft model with the target's own tokenizer"
                )


def _encode(core: Core, text: str, add_special: bool) -> list[int]:
    """Return token ids. Raises RequestError."""
    try:
        # The library encodes a batch without the interpreter's lock, so a long text blocks no other thread.
        (encoding,) = core.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
    except (UnicodeError, TypeError) as error:
        surrogate = next((char for char in text if "\ud800" <= char <= "\udfff"), "")
        raise RequestError(
            f"the prompt is not valid UTF-8 text: {surrogate!r} is half of a character; leave it out, or read the "
            "text anew in its own encoding"
        ) from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = " ".join(str(error).split())[:300]
        raise RequestError(f"the model's tokenizer does not take this text ({reason}); change the text") from error
    return ids


def configured_eos_ids(folder: Path) -> frozenset[int]:
    """Return the end-of-sequence ids in config.json and generation_config.json. Raises ModelError."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            fields = Fields(read_json(folder / name), name)
            value = fields.get("eos_token_id")
            token_ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int for i in token_ids):
                raise fields.refusal("eos_token_id", ["token ids", "lists of them"])
            ids.update(token_ids)
    return frozenset(ids)


class TextStream:
    """Incremental decoder: complete characters, without special tokens.

    replaced: by id of a token, its text and the one that stands in its place.
    """

    def __init__(
        self, core: Core, prefix_ids: Sequence[int] = (), replaced: Mapping[int, tuple[str, str]] | None = None
    ) -> None:
        self._core = core
        self._replaced = replaced or {}
        self._emitted_ids = list(prefix_ids[-DECODE_CONTEXT:]) if prefix_ids else []
        if self._text(self._emitted_ids).endswith("�"):
            self._emitted_ids = []  # the incomplete character would be emitted again
        self._pending_ids: list[int] = []
        self._stream = DecodeStream(self._emitted_ids, skip_special_tokens=True)

    def step(self, token: int) -> str:
        """Return the text that this token completes, perhaps an empty one."""
        self._pending_ids.append(token)
        try:
            text = self._stream.step(self._core, token)
        except Exception:
            # Byte tokens outside any character can change the text of earlier tokens, which is emitted already.
            self._stream = DecodeStream(skip_special_tokens=True)
            text = self._stream.step(self._core, self._pending_ids)
        if text:
            self._emitted_ids = self._pending_ids
            self._pending_ids = []
        if token not in self._replaced:
            return text or ""
        spelled, shown = self._replaced[token]
        return (text or "").removesuffix(spelled) + shown

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete characters. Ends the stream."""
        emitted_text = self._text(self._emitted_ids)
        remaining_text = self._text(self._emitted_ids + self._pending_ids)[len(emitted_text) :]
        self._pending_ids = []
        return remaining_text

    def _text(self, ids: list[int]) -> str:
        return str(self._core.decode(ids, skip_special_tokens=True))
