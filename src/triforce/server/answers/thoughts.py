"""Thoughts: what a model writes between two marks in front of its answer."""

from __future__ import annotations

from typing import NamedTuple

from triforce.engine.engine import partial_match


class ThoughtMarks(NamedTuple):
    """The marks around thoughts, and those texts in them that are tokens of their own."""

    opening: str
    closing: str
    tokens: tuple[str, ...]


THOUGHT_MARKS = (
    ThoughtMarks("<think>", "</think>", ("<think>", "</think>")),  # Qwen, GLM, DeepSeek and others
    ThoughtMarks("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),  # Mistral
    ThoughtMarks("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),  # Gemma 4
)


def thought_marks(template: str) -> ThoughtMarks | None:
    """Return the marks of a chat template, or None if it has no thoughts."""
    return next((marks for marks in THOUGHT_MARKS if marks.closing in template), None)


class ThoughtSplitter:
    """Separates thoughts from a growing answer.

    marks: opening and closing mark as the answer shows them; without any all is answer. open_at_start: whether the
    answer begins inside thoughts, as the prompt ends with the mark. Marks later in the answer are text.
    """

    def __init__(self, marks: tuple[str, str] | None = None, *, open_at_start: bool = False) -> None:
        has_thoughts = marks is not None
        self._opening, self._closing = marks or ("", "")
        self._buffer = ""
        self._may_open = has_thoughts and not open_at_start
        self._thinks = has_thoughts and open_at_start
        self._at_start = self._thinks  # of thoughts, or of an answer behind them: white space is dropped there

    def add(self, text: str, is_final: bool) -> tuple[str, str]:
        """Return the new thoughts and the new text of the answer that are certain. is_final: `text` ends the answer."""
        self._buffer += text
        if self._may_open:
            start = self._buffer.lstrip()
            if self._opening.startswith(start) and start != self._opening and not is_final:
                return "", ""
            if is_final and 1 < len(start) < len(self._opening) and self._opening.startswith(start):
                return "", ""  # the mark is cut
            self._may_open = False
            self._thinks = start.startswith(self._opening)
            self._at_start = self._thinks
            self._buffer = start[len(self._opening) :] if self._thinks else self._buffer
        if not self._thinks:
            return "", self._answer()
        thoughts, mark, answer_text = self._buffer.partition(self._closing)
        if mark:
            self._thinks = False
            self._buffer = answer_text
            thoughts = self._trimmed(thoughts.rstrip())
            self._at_start = True
            return thoughts, self._answer()
        certain = thoughts if is_final else thoughts[: len(thoughts) - partial_match(thoughts, [self._closing])]
        certain = certain.rstrip()
        self._buffer = self._buffer[len(certain) :]
        return self._trimmed(certain), ""

    def _answer(self) -> str:
        text = self._trimmed(self._buffer)
        self._buffer = ""
        return text

    def _trimmed(self, text: str) -> str:
        """Return text without white space at the start of a part."""
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text
