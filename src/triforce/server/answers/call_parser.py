"""Calls in a growing answer: text is released as it comes, and held back while it may belong to a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triforce.checkpoint.control_tokens import one_of_pattern
from triforce.engine.engine import partial_match
from triforce.server.answers.answer_parts import AnswerPart, Call

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

    openings: a block for each mark that opens one. closings: marks that are dropped where no block is open. bare_calls:
    a block that may be the whole answer, such as a bare JSON object. several: whether text and
    calls may follow a call. forced: whether a grammar allows calls only; then there is no text.
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
        partial_length = partial_match(self._text, self._marks)
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

    def _release(self, parts: list[AnswerPart], end: int, *, trimmed: bool) -> str:
        """Release text up to an index, and return the rest. trimmed: without white space at the end, which stays."""
        text = self._text[:end]
        text = text.rstrip() if trimmed else text
        if text:
            parts.append(text)
        return self._text[len(text) :]


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

    def read(self, text: str, is_final: bool) -> BlockEnd | None:
        closing_start = text.find(self._closing, self._place)
        is_closed = closing_start >= 0
        if not is_closed and not is_final:
            self._place = max(self._place, len(text) - len(self._closing) + 1)
            return None
        if not is_closed:
            closing_start = len(text) - partial_match(text, [self._closing])
        body = text[len(self._opening) : closing_start]
        end = closing_start + len(self._closing)
        calls = self._calls_in(body, is_closed)
        if calls is None or (is_closed and not calls):
            return BlockEnd([body.strip()] if body.strip() else [], end)
        return BlockEnd([*calls], end, is_cut=not calls)
