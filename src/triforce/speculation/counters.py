"""Counters: passes of a tier and verdicts on its proposals, per row.

Shape suffixes: B rows, N draft tokens accepted at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from triforce.ragged import Bools, Ints

REMEMBERED = 4096  # passes


class Counters:
    """Draft tokens that a tier proposed, and those that the tier above accepted; passes; seconds.

    accepted_BN counts the proposals of which 0, 1, ... tokens were accepted. rejected_B counts those of which a token
    was rejected, or that were empty. verdicts_B3: tokens accepted, proposals rejected, and tokens proposed, since they
    were last asked for. The seconds of a row are those of the passes that it took part in.
    """

    def __init__(self, rows: int) -> None:
        self.proposed_B, self.accepted_B, self.rejected_B, self.passes_B = np.zeros((4, rows), dtype=np.int64)
        self.accepted_BN = np.zeros((rows, 1), dtype=np.int64)
        self.seconds_B, self.prefill_seconds_B = np.zeros(rows), np.zeros(rows)
        self.verdicts_B3 = np.zeros((rows, 3), dtype=np.int64)
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED)

    @property
    def _of_rows(self) -> list[str]:
        """Names of what is counted by row: everything but the latest passes."""
        return [name for name in vars(self) if name != "_passes"]

    def record_passes(
        self, live_B: Bools, seconds: float, width: int = 1, passes: int = 1, continued: bool = False
    ) -> None:
        """Record passes of so many columns each, for the live rows; `continued` ones belong to those before."""
        self.passes_B += passes * live_B
        self.seconds_B += seconds * live_B
        tokens, rows = width * passes, int(live_B.sum())
        if continued and self._passes:
            before, rows, earlier = self._passes.pop()
            tokens, seconds = tokens + before, seconds + earlier
        self._passes.append((tokens, rows, seconds))

    def new_passes(self) -> list[tuple[int, int, float]]:
        """Return the latest passes and fused drafts since the last call: tokens of a row, rows, and seconds of each."""
        passes = list(self._passes)
        self._passes.clear()
        return passes

    def new_verdicts(self) -> Ints:
        """Return tokens accepted, proposals rejected, and tokens proposed, since the last call: (B, 3)."""
        verdicts_B3, self.verdicts_B3 = self.verdicts_B3, np.zeros_like(self.verdicts_B3)
        return verdicts_B3

    def record_verdict(self, offered_B: Ints, accepted_B: Ints, live_B: Bools) -> None:
        """Record that the tier above accepted the first `accepted_B` of `offered_B` proposed tokens."""
        offered_B, accepted_B = offered_B * live_B, accepted_B * live_B
        self.proposed_B += offered_B
        self.accepted_B += accepted_B
        rejected_B = live_B & ((accepted_B < offered_B) | (offered_B == 0))
        self.rejected_B += rejected_B
        self.verdicts_B3 += np.stack((accepted_B, rejected_B, offered_B), 1)
        self._widen(int(accepted_B.max()) + 1)
        self.accepted_BN[np.arange(len(accepted_B)), accepted_B] += live_B

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        for name in self._of_rows:
            setattr(self, name, getattr(self, name)[list(rows)])

    def join(self, other: Counters) -> None:
        """Append the rows of another tier's counters."""
        self._widen(other.accepted_BN.shape[1])
        other._widen(self.accepted_BN.shape[1])
        for name in self._of_rows:
            setattr(self, name, np.concatenate((getattr(self, name), getattr(other, name))))

    def swap_out(self, b: int) -> dict[str, Any]:
        """Return the counts of a row, for `swap_in`; verdicts are asked for where it leaves."""
        return {name: getattr(self, name)[b].copy() for name in self._of_rows if name != "verdicts_B3"}

    def swap_in(self, b: int, counts: dict[str, Any]) -> None:
        """Let a fresh row go on with these counts."""
        self._widen(len(counts["accepted_BN"]))
        for name, count in counts.items():
            row = getattr(self, name)[b : b + 1].reshape(-1)
            row[: np.size(count)] = count

    def _widen(self, columns: int) -> None:
        if (more := columns - self.accepted_BN.shape[1]) > 0:
            self.accepted_BN = np.pad(self.accepted_BN, ((0, 0), (0, more)))
