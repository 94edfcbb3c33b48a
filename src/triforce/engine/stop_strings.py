"""The text of one completion as it grows, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringBuffer:
    """Gives out text as soon as no stop string can begin in it. A stop string itself is never given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """What can be shown now that `piece` has arrived. Nothing after a stop."""
        if self.stopped:
            return ""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._show(min(found))
        return self._show(len(self._held) - partial_match(self._held, self._stops))

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        return "" if self.stopped else self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown


def partial_match(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of one of `stops`, and not all of it."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
