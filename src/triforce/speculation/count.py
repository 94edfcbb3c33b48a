"""What happened to a tier's proposals, counted per row. B rows, N kept at once."""

from __future__ import annotations

from collections import deque

import numpy as np

from triforce.shapes import Bools, Ints

REMEMBERED = 256  # passes


class Counters:
    """Tokens a tier proposed, those the tier above kept (in all, and how often 0, 1, ... at once); passes; seconds.

    `refused_B` counts the proposals of which something was refused, or that were empty.
    """

    def __init__(self, rows: int) -> None:
        self.proposed_B = np.zeros(rows, dtype=np.int64)
        self.accepted_B = np.zeros(rows, dtype=np.int64)
        self.refused_B = np.zeros(rows, dtype=np.int64)
        self.kept_BN = np.zeros((rows, 1), dtype=np.int64)
        self.passes_B = np.zeros(rows, dtype=np.int64)
        self.seconds = self.prefill_seconds = 0.0
        self._passes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def passed(self, live_B: Bools, seconds: float, width: int = 1) -> None:
        """The tier made one pass of so many columns for its live rows."""
        self.passes_B += live_B
        self.seconds += seconds
        self._passes.append((width * int(live_B.sum()), seconds))

    def fresh(self) -> list[tuple[int, float]]:
        """The passes since this was last asked, the latest of them: tokens of all rows, and seconds."""
        passes = list(self._passes)
        self._passes.clear()
        return passes

    def judged(self, offered_B: Ints, kept_B: Ints, live_B: Bools) -> None:
        """The tier above kept the first `kept_B` of `offered_B` proposed tokens."""
        kept_B = kept_B * live_B
        self.proposed_B += offered_B * live_B
        self.accepted_B += kept_B
        self.refused_B += live_B & ((kept_B < offered_B) | (offered_B == 0))
        if (more := int(kept_B.max()) + 1 - self.kept_BN.shape[1]) > 0:
            self.kept_BN = np.pad(self.kept_BN, ((0, 0), (0, more)))
        self.kept_BN[np.arange(len(kept_B)), kept_B] += live_B
