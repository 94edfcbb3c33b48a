"""SequenceState, the texts so far, and Draft, tokens proposed to follow them.

Tokens, counts and lengths are on the host, in numpy; probabilities stay where they were computed.
Shape suffixes: B rows, S text capacity, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.ragged import Bools, Ints, columns, rows, to_device


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Token ids of each row so far. Ids at or past `lengths_B` are scratch, free to be overwritten."""

    ids_BS: Ints
    lengths_B: Ints

    def append(self, draft: Draft) -> SequenceState:
        """Return these texts with each row's draft tokens behind them. Shares `ids_BS`: only scratch is written."""
        B, width = draft.tokens_BK.shape
        if width == 0:
            return self
        # Padding of a row at the end of its capacity has no place to go; it is folded onto the last column, which is
        # scratch because a text is never filled to the brim (see engine/sequence_batch.py).
        at_BK = np.minimum(self.lengths_B[:, None] + np.arange(width), self.ids_BS.shape[1] - 1)
        self.ids_BS[np.arange(B)[:, None], at_BK] = draft.tokens_BK
        return SequenceState(self.ids_BS, self.lengths_B + draft.counts_B)

    def select(self, rows: Sequence[int]) -> SequenceState:
        """Return some of the rows."""
        return SequenceState(self.ids_BS[list(rows)], self.lengths_B[list(rows)])

    def join(self, other: SequenceState) -> SequenceState:
        """Return these rows, and behind them those of another state."""
        width = max(self.ids_BS.shape[1], other.ids_BS.shape[1])
        both = [np.pad(x.ids_BS, ((0, 0), (0, width - x.ids_BS.shape[1]))) for x in (self, other)]
        return SequenceState(np.concatenate(both), np.concatenate((self.lengths_B, other.lengths_B)))


@dataclass(frozen=True, slots=True)
class Draft:
    """Next tokens of each row, the probabilities each was drawn from, and the tier that drew it.

    Past `counts_B` is padding. probs_BKV is what verification by the tier above needs: under `rejection` the float64
    distribution of each token, under `seeded` nothing (V = 0).
    """

    tokens_BK: Ints
    probs_BKV: Tensor
    origins_BK: Ints
    counts_B: Ints

    @staticmethod
    @cache
    def empty(count: int, probs_size: int) -> Draft:
        """Return a draft of no tokens for `count` rows. It is always the same one: nobody writes to a draft."""
        nothing_BK = np.zeros((count, 0), dtype=np.int64)
        probs_BKV = torch.zeros(count, 0, probs_size, dtype=torch.float64)
        return Draft(nothing_BK, probs_BKV, nothing_BK, np.zeros(count, dtype=np.int64))

    def then(self, step: Draft, live_B: Bools) -> Draft:
        """Return this draft with `step` behind it, in the rows that are live."""
        counts_B = self.counts_B + step.counts_B * live_B
        tokens_BK = step.tokens_BK
        probs_BKV = step.probs_BKV
        origins_BK = step.origins_BK
        if self.tokens_BK.shape[1]:
            at_BK = columns(self.counts_B, tokens_BK.shape[1])
            tokens_BK, origins_BK = (
                _put(np.concatenate((before, after), 1), at_BK, after)
                for before, after in ((self.tokens_BK, tokens_BK), (self.origins_BK, origins_BK))
            )
            probs_BKV = _join_probs(self.probs_BKV, probs_BKV, at_BK)
        longest = int(counts_B.max())
        if longest < tokens_BK.shape[1]:
            tokens_BK = tokens_BK[:, :longest]
            origins_BK = origins_BK[:, :longest]
            probs_BKV = probs_BKV[:, :longest]
        return Draft(tokens_BK, probs_BKV, origins_BK, counts_B)


def _put(cells_BK: Ints, at_BJ: Ints, values_BJ: Ints) -> Ints:
    cells_BK[rows(len(cells_BK)), at_BJ] = values_BJ
    return cells_BK


def _join_probs(before_BKV: Tensor, after_BJV: Tensor, at_BJ: Ints) -> Tensor:
    both_BKV = torch.cat((before_BKV.to(after_BJV.device), after_BJV), 1)
    if both_BKV.shape[2]:
        at_BJ1 = to_device(at_BJ, both_BKV.device)[..., None]
        both_BKV.scatter_(1, at_BJ1.expand_as(after_BJV), after_BJV)
    return both_BKV


MAX_PASSES = 4096  # passes


class Counters:
    """Draft tokens that a tier proposed, and those that the tier above accepted; passes; seconds.

    accepted_BN counts the proposals of which 0, 1, ... tokens were accepted. rejected_B counts those of which a token
    was rejected, or that were empty. verdicts_B3: tokens accepted, proposals rejected, and tokens proposed, since they
    were last asked for. The seconds of a row are those of the passes that it took part in.
    """

    def __init__(self, rows: int) -> None:
        self.proposed_B, self.accepted_B, self.rejected_B, self.passes_B = np.zeros((4, rows), dtype=np.int64)
        self.accepted_BN = np.zeros((rows, 1), dtype=np.int64)
        self.seconds_B = np.zeros(rows)
        self.prefill_seconds_B = np.zeros(rows)
        self.verdicts_B3 = np.zeros((rows, 3), dtype=np.int64)
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=MAX_PASSES)

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
        tokens = width * passes
        rows = int(live_B.sum())
        if continued and self._passes:
            before, rows, earlier = self._passes.pop()
            tokens = tokens + before
            seconds = seconds + earlier
        self._passes.append((tokens, rows, seconds))

    def new_passes(self) -> list[tuple[int, int, float]]:
        """Return the latest passes and fused drafts since the last call: tokens of a row, rows, and seconds of each."""
        passes = list(self._passes)
        self._passes.clear()
        return passes

    def new_verdicts(self) -> Ints:
        """Return tokens accepted, proposals rejected, and tokens proposed, since the last call: (B, 3)."""
        verdicts_B3 = self.verdicts_B3
        self.verdicts_B3 = np.zeros_like(self.verdicts_B3)
        return verdicts_B3

    def record_verdict(self, offered_B: Ints, accepted_B: Ints, live_B: Bools) -> None:
        """Record that the tier above accepted the first `accepted_B` of `offered_B` proposed tokens."""
        offered_B = offered_B * live_B
        accepted_B = accepted_B * live_B
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
