"""Thoughts: what a model writes between `THOUGHTS_OPEN` and `THOUGHTS_CLOSE` in front of its answer."""

from __future__ import annotations

from triforce.engine.engine import partial_match

THOUGHTS_OPEN = "<think>"
THOUGHTS_CLOSE = "</think>"


class ThoughtSplitter:
    """Separates thoughts from a growing answer.

    has_thoughts: whether answers may begin with thoughts; else all is answer. open_at_start: whether this one begins
    inside them, as the prompt ends with the mark. Marks later in the answer are text.
    """

    def __init__(self, *, has_thoughts: bool = False, open_at_start: bool = False) -> None:
        self._buffer = ""
        self._may_open = has_thoughts and not open_at_start
        self._thinks = has_thoughts and open_at_start
        self._at_start = self._thinks  # of thoughts, or of an answer behind them: white space is dropped there

    def add(self, text: str, is_final: bool) -> tuple[str, str]:
        """Return the new thoughts and the new text of the answer that are certain. is_final: `text` ends the answer."""
        self._buffer += text
        if self._may_open:
            start = self._buffer.lstrip()
            if THOUGHTS_OPEN.startswith(start) and start != THOUGHTS_OPEN and not is_final:
                return "", ""
            self._may_open = False
            self._thinks = start.startswith(THOUGHTS_OPEN)
            self._at_start = self._thinks
            self._buffer = start[len(THOUGHTS_OPEN) :] if self._thinks else self._buffer
        if not self._thinks:
            return "", self._answer()
        thoughts, mark, answer_text = self._buffer.partition(THOUGHTS_CLOSE)
        if mark:
            self._thinks = False
            self._buffer = answer_text
            thoughts = self._trimmed(thoughts.rstrip())
            self._at_start = True
            return thoughts, self._answer()
        certain = thoughts if is_final else thoughts[: len(thoughts) - partial_match(thoughts, [THOUGHTS_CLOSE])]
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
