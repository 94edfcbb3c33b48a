"""What happened to a tier's proposals, counted per row. B rows, N kept at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from triforce.ragged import Bools, Ints

REMEMBERED = 256  # passes
_OF_ROWS = ("proposed_B", "accepted_B", "refused_B", "passes_B", "kept_BN", "news_B2", "seconds_B", "prefill_seconds_B")


class Counters:
    """Tokens a tier proposed, those the tier above kept (in all, and how often 0, 1, ... at once); passes; seconds.

    `refused_B` counts the proposals of which something was refused, or that were empty. The seconds of a row are those
    of the passes that it took part in. `news_B2`: proposals kept, and refused, since somebody last asked.
    """

    def __init__(self, rows: int) -> None:
        self.proposed_B, self.accepted_B, self.refused_B, self.passes_B = np.zeros((4, rows), dtype=np.int64)
        self.kept_BN = np.zeros((rows, 1), dtype=np.int64)
        self.seconds_B, self.prefill_seconds_B = np.zeros(rows), np.zeros(rows)
        self.news_B2 = np.zeros((rows, 2), dtype=np.int64)
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED)

    def passed(self, live_B: Bools, seconds: float, width: int = 1, passes: int = 1, one_burst: bool = False) -> None:
        """The tier made so many passes, of so many columns each, for its live rows.

        `one_burst`: they belong to the passes before.
        """
        self.passes_B += passes * live_B
        self.seconds_B += seconds * live_B
        tokens, rows = width * passes, int(live_B.sum())
        if one_burst and self._passes:
            before, rows, earlier = self._passes.pop()
            tokens, seconds = tokens + before, seconds + earlier
        self._passes.append((tokens, rows, seconds))

    def fresh(self) -> list[tuple[int, int, float]]:
        """The passes and bursts since this was last asked, the latest of them: tokens of a row, rows, and seconds."""
        passes = list(self._passes)
        self._passes.clear()
        return passes

    def verdicts(self) -> Ints:
        """Of each row, the proposals kept, and refused, since this was last asked."""
        news_B2, self.news_B2 = self.news_B2, np.zeros_like(self.news_B2)
        return news_B2

    def judged(self, offered_B: Ints, kept_B: Ints, live_B: Bools) -> None:
        """The tier above kept the first `kept_B` of `offered_B` proposed tokens."""
        kept_B = kept_B * live_B
        self.proposed_B += offered_B * live_B
        self.accepted_B += kept_B
        refused_B = live_B & ((kept_B < offered_B) | (offered_B == 0))
        self.refused_B += refused_B
        self.news_B2 += np.stack((kept_B, refused_B), 1)
        self._widen(int(kept_B.max()) + 1)
        self.kept_BN[np.arange(len(kept_B)), kept_B] += live_B

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was."""
        for name in _OF_ROWS:
            setattr(self, name, getattr(self, name)[list(rows)])

    def join(self, other: Counters) -> None:
        """The rows of another tier's counters follow these."""
        self._widen(other.kept_BN.shape[1])
        other._widen(self.kept_BN.shape[1])
        for name in _OF_ROWS:
            setattr(self, name, np.concatenate((getattr(self, name), getattr(other, name))))

    def aside(self, b: int) -> dict[str, Any]:
        """The counts of a row, for `bring_back`."""
        return {name: getattr(self, name)[b].copy() for name in _OF_ROWS}

    def bring_back(self, b: int, counts: dict[str, Any]) -> None:
        """Let a fresh row go on with these."""
        self._widen(len(counts["kept_BN"]))
        for name, count in counts.items():
            row = getattr(self, name)[b : b + 1].reshape(-1)
            row[: np.size(count)] = count

    def _widen(self, columns: int) -> None:
        if (more := columns - self.kept_BN.shape[1]) > 0:
            self.kept_BN = np.pad(self.kept_BN, ((0, 0), (0, more)))
