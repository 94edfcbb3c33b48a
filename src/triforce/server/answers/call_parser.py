"""Calls in a growing answer: text is released as it comes, and held back while it may belong to a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triforce.checkpoint.control_tokens import one_of_pattern
from triforce.engine.engine import partial_match
from triforce.server.answers.answer_parts import AnswerPart, Call

_TAG = re.compile(r"</?[a-z_]+(?:=[^>]*)?>")
MAX_CLOSINGS = 32
"""Closing marks that are tried as parts of a value, before a call counts as malformed."""
MIN_CUT_MARK = 2
"""Characters of a mark at the end of an answer that are a cut mark rather than text: a lone `<` is text."""


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The end of a block: its parts, and the index of the text behind it."""

    parts: list[AnswerPart] = field(default_factory=list)
    end: int = 0
    is_cut: bool = False
    """Whether the answer ended inside a call."""


class CallBlock(Protocol):
    """Reads a part of an answer that may hold calls. A new one is made for each block."""

    def read(self, text: str, is_final: bool) -> BlockEnd | None:
        """Return the block's end, or None if the text ends before it; with `is_final` always its end.

        text: the answer from the beginning of the block on, its opening mark included. Between the calls of this
        method it only grows.
        """


class CallParser:
    """Separates calls from text.

    openings: a block for each mark that opens one. closings: further marks, which are dropped where no block is open.
    bare_calls: a block that may be the whole answer, such as a bare JSON object. several: whether text and calls may
    follow a call. forced: whether a grammar allows calls only; then there is no text.
    """

    def __init__(
        self,
        openings: Mapping[str, Callable[[], CallBlock]],
        closings: Collection[str] = (),
        *,
        bare_calls: CallBlock | None = None,
        several: bool = True,
        forced: bool = False,
    ) -> None:
        self.is_cut = False
        self._openings = openings
        self._marks = [*openings, *closings]
        self._longest_mark = max(map(len, self._marks), default=0) or 1
        self._first_characters = {mark[0] for mark in self._marks}
        self._pattern = re.compile(one_of_pattern(self._marks) or "(?!)")
        self._several = several
        self._forced = forced
        self._block = bare_calls
        self._text = ""  # what is unread; in a block, what is behind its beginning
        self._has_call = False
        self._has_ended = False

    def add(self, text: str, is_final: bool) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while not self._has_ended and self._step(parts, is_final):
            pass
        if is_final and self._forced and not self._has_call:
            self.is_cut = True
        return [part for part in parts if isinstance(part, Call)] if self._forced else parts

    def _step(self, parts: list[AnswerPart], is_final: bool) -> bool:
        """Read a block or the text before the next one. Returns whether there may be more."""
        return self._read_block(self._block, parts, is_final) if self._block else self._read_text(parts, is_final)

    def _read_block(self, block: CallBlock, parts: list[AnswerPart], is_final: bool) -> bool:
        end = block.read(self._text, is_final)
        if end is None:
            return False
        self._block = None
        self._text = self._text[end.end :]
        self.is_cut = end.is_cut
        calls = [part for part in end.parts if isinstance(part, Call)]
        self._has_call = self._has_call or bool(calls)
        if calls and not self._several:
            parts += end.parts[: end.parts.index(calls[0]) + 1]
            self._has_ended = True
        else:
            parts += end.parts
        return True

    def _read_text(self, parts: list[AnswerPart], is_final: bool) -> bool:
        """Release text up to the next mark. White space before a mark, and behind the last call, is dropped."""
        if match := self._pattern.search(self._text):
            mark = match[0]
            self._release(parts, match.start(), trimmed=True)
            if mark in self._openings:
                self._text = self._text[match.start() :]
                self._block = self._openings[mark]()
            else:
                self._text = self._text[match.end() :]
            return True
        partial_length = self._partial_length()
        certain_end = len(self._text) - partial_length
        if not is_final:
            self._text = self._release(parts, certain_end, trimmed=True)
            return False
        if partial_length >= MIN_CUT_MARK:
            self.is_cut = True
            self._release(parts, certain_end, trimmed=True)
        else:
            self._release(parts, len(self._text), trimmed=self._has_call)
        self._text = ""
        return False

    def _partial_length(self) -> int:
        """Return how many characters at the end may begin a mark."""
        tail = self._text[-self._longest_mark :]
        may_begin = any(character in tail for character in self._first_characters)
        return partial_match(tail, self._marks) if may_begin else 0

    def _release(self, parts: list[AnswerPart], end: int, *, trimmed: bool) -> str:
        """Release text up to an index, and return the rest. trimmed: without white space at the end, which stays."""
        text = self._text[:end]
        text = text.rstrip() if trimmed else text
        if text:
            parts.append(text)
        return self._text[len(text) :]


def cut_or_text(body: str, head: str, is_closed: bool) -> list[Call] | None:
    """Return what `calls_in` of `DelimitedBlock` returns for a body that is no call. head: how calls begin."""
    text = body.lstrip()
    return [] if not is_closed and (text.startswith(head) or head.startswith(text)) else None


class DelimitedBlock:
    """A block up to its closing mark, which `calls_in` reads as a whole.

    opening, closing: marks as the answer shows them. closing may lack at the end of an answer. calls_in: returns the
    calls in the text between both, given whether the closing mark ends it; an empty list if the text begins as a call
    and does not end; None if it is no call.
    """

    def __init__(self, opening: str, closing: str, calls_in: Callable[[str, bool], list[Call] | None]) -> None:
        self._opening = opening
        self._closing = closing
        self._calls_in = calls_in
        self._place = len(opening)  # before it there is no closing mark
        self._first_closing: int | None = None
        self._closings = 0

    def read(self, text: str, is_final: bool) -> BlockEnd | None:
        while (closing_start := text.find(self._closing, self._place)) >= 0:
            self._first_closing = min(closing_start, self._first_closing or closing_start)
            body = text[len(self._opening) : closing_start]
            calls = self._calls_in(body, True)
            end = closing_start + len(self._closing)
            if calls is None:
                return BlockEnd([body.strip()] if body.strip() else [], end)
            if calls:
                return BlockEnd([*calls], end)
            self._place = end  # the mark may be a part of a value
            self._closings += 1
            if self._closings == MAX_CLOSINGS:
                return self._malformed(text)
        if not is_final:
            self._place = max(self._place, len(text) - len(self._closing) + 1)
            return None
        if self._first_closing is not None:
            return self._malformed(text)
        body = text[len(self._opening) : len(text) - partial_match(text, [self._closing])]
        calls = self._calls_in(body, False)
        if calls is None:
            return BlockEnd([body.strip()] if body.strip() else [], len(text))
        return BlockEnd([*calls], len(text), is_cut=not calls)

    def _malformed(self, text: str) -> BlockEnd:
        """Return the text of a call that has its end and cannot be read, without its tags."""
        first_closing = self._first_closing or 0
        body = " ".join(_TAG.sub(" ", text[len(self._opening) : first_closing]).split())
        return BlockEnd([body] if body else [], first_closing + len(self._closing))
