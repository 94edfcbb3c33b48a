"""Parts of an answer, and what separates them in a growing text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Protocol

from triforce.server.answers.marks import Marks
from triforce.server.answers.thoughts import ThoughtSplitter

MAX_LEVELS = 128
"""Maximal nesting of a schema, and of a call's arguments as an object: safe for grammars and for JSON."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function by name, and its arguments: the JSON of an object, as the model wrote it."""

    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """Return the arguments as an object, for doors that send them so.

        A number beyond the range of floats is its text there. Arguments that are nested too deeply to be sent back are
        one text.
        """
        try:
            values: dict[str, Any] = json.loads(self.arguments, parse_float=_float_or_text)
        except RecursionError:
            return {"arguments": self.arguments}
        level: list[Any] = [values]
        for _ in range(MAX_LEVELS):
            containers = [part.values() if isinstance(part, dict) else part for part in level]
            level = [part for container in containers for part in container if isinstance(part, dict | list)]
            if not level:
                return values
        return {"arguments": self.arguments}


def _float_or_text(written: str) -> float | str:
    number = float(written)
    return number if math.isfinite(number) else written


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Text that a model wrote for itself, before its answer or between its calls."""

    text: str


AnswerPart = str | Call | Thoughts
"""A part of an answer; a `str` is text."""


class AnswerParser(Protocol):
    """Separates the parts of a growing answer."""

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended inside a call, which is then dropped."""

    def add(self, text: str, is_final: bool) -> list[AnswerPart]:
        """Return the new parts that are certain. With `is_final` the text is complete, and all parts are returned."""


class TextParser:
    """A parser of answers without calls: all is text."""

    is_cut = False

    def add(self, text: str, is_final: bool) -> list[AnswerPart]:
        return [text] if text else []


class ThinkingParser:
    """Separates thoughts in front of an answer, whose other parts `answer` separates."""

    def __init__(self, thoughts: ThoughtSplitter, answer: AnswerParser) -> None:
        self._thoughts = thoughts
        self._answer = answer

    @property
    def is_cut(self) -> bool:
        return self._answer.is_cut

    def add(self, text: str, is_final: bool) -> list[AnswerPart]:
        thoughts, answer = self._thoughts.add(text, is_final)
        parts: list[AnswerPart] = [Thoughts(thoughts)] if thoughts else []
        return parts + self._answer.add(answer, is_final)


class RestoredAnswer:
    """The parts of a parser with the marks that stayed in text restored, see `Marks.restored`.

    thoughts_are_text: whether thoughts become text.
    """

    def __init__(self, parser: AnswerParser, marks: Marks, *, thoughts_are_text: bool = False) -> None:
        self._parser = parser
        self._marks = marks
        self._thoughts_are_text = thoughts_are_text

    @property
    def is_cut(self) -> bool:
        return self._parser.is_cut

    def add(self, text: str, is_final: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for part in self._parser.add(text, is_final):
            if isinstance(part, Call):
                parts.append(part)
            elif restored := self._marks.restored(part if isinstance(part, str) else part.text):
                is_text = isinstance(part, str) or self._thoughts_are_text
                parts.append(restored if is_text else Thoughts(restored))
        return parts
