"""SequenceState, the texts so far; Draft, tokens proposed to follow them; Counters, what became of proposals.

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

from triforce.arrays import Array, namespace, on_device_of
from triforce.ragged import Bools, Ints, columns, rows


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Token ids of each row so far. Ids at or after `lengths_B` are scratch and may be overwritten."""

    ids_BS: Ints
    lengths_B: Ints

    def append(self, draft: Draft) -> SequenceState:
        """Return these texts with each row's draft tokens appended. Shares `ids_BS`, as only scratch is written."""
        B, width = draft.tokens_BK.shape
        if width == 0:
            return self
        # Padding that would lie beyond the last column is written to it: that column is scratch, as no text reaches it.
        column_BK = np.minimum(self.lengths_B[:, None] + np.arange(width), self.ids_BS.shape[1] - 1)
        self.ids_BS[np.arange(B)[:, None], column_BK] = draft.tokens_BK
        return SequenceState(self.ids_BS, self.lengths_B + draft.counts_B)

    def select(self, rows: Sequence[int]) -> SequenceState:
        """Return these rows, in this order."""
        return SequenceState(self.ids_BS[list(rows)], self.lengths_B[list(rows)])

    def join(self, other: SequenceState) -> SequenceState:
        """Return these rows, followed by those of `other`."""
        width = max(self.ids_BS.shape[1], other.ids_BS.shape[1])
        padded_ids = [np.pad(state.ids_BS, ((0, 0), (0, width - state.ids_BS.shape[1]))) for state in (self, other)]
        return SequenceState(np.concatenate(padded_ids), np.concatenate((self.lengths_B, other.lengths_B)))


@dataclass(frozen=True, slots=True)
class Draft:
    """Next tokens of each row, the distribution that each was drawn from, and the level of the tier that drew it.

    Tokens after `counts_B` are padding. probs_BKV: the probabilities that verification by the tier above needs. Under
    `rejection` it is the float64 distribution of each token, under `seeded` it is empty (V = 0).
    """

    tokens_BK: Ints
    probs_BKV: Array
    origins_BK: Ints
    counts_B: Ints

    @staticmethod
    @cache
    def empty(count: int, probs_size: int) -> Draft:
        """Return a draft without tokens for `count` rows. The object is shared, as no code writes to a draft."""
        nothing_BK = np.zeros((count, 0), dtype=np.int64)
        probs_BKV = np.zeros((count, 0, probs_size))
        return Draft(nothing_BK, probs_BKV, nothing_BK, np.zeros(count, dtype=np.int64))

    def extend(self, step: Draft, live_B: Bools) -> Draft:
        """Return this draft with the tokens of `step` appended in the live rows."""
        counts_B = self.counts_B + step.counts_B * live_B
        tokens_BK = step.tokens_BK
        probs_BKV = step.probs_BKV
        origins_BK = step.origins_BK
        if self.tokens_BK.shape[1]:
            column_BK = columns(self.counts_B, tokens_BK.shape[1])
            tokens_BK, origins_BK = (
                _put(np.concatenate((old_cells_BK, new_cells_BK), 1), column_BK, new_cells_BK)
                for old_cells_BK, new_cells_BK in ((self.tokens_BK, tokens_BK), (self.origins_BK, origins_BK))
            )
            probs_BKV = _join_probs(self.probs_BKV, probs_BKV, column_BK)
        longest = int(counts_B.max())
        if longest < tokens_BK.shape[1]:
            tokens_BK = tokens_BK[:, :longest]
            origins_BK = origins_BK[:, :longest]
            probs_BKV = probs_BKV[:, :longest]
        return Draft(tokens_BK, probs_BKV, origins_BK, counts_B)


def _put(cells_BK: Ints, column_BJ: Ints, values_BJ: Ints) -> Ints:
    cells_BK[rows(len(cells_BK)), column_BJ] = values_BJ
    return cells_BK


def _join_probs(old_BKV: Array, new_BJV: Array, column_BJ: Ints) -> Array:
    joined_BKV = namespace(new_BJV).concat([on_device_of(old_BKV, new_BJV), new_BJV], axis=1)
    if joined_BKV.shape[2]:
        row_B1, column_BJ = (on_device_of(index, new_BJV) for index in (rows(len(column_BJ)), column_BJ))
        joined_BKV[row_B1, column_BJ] = new_BJV
    return joined_BKV


MAX_PASSES = 4096  # passes whose seconds are kept until `new_passes` takes them


class Counters:
    """Counts of a tier by row: draft tokens proposed, draft tokens that the tier above accepted, passes, seconds.

    accepted_BN: number of proposals with 0, 1, ... accepted tokens. rejected_B: number of proposals that did not lead
    to further draft tokens: some token was rejected, or there was none. verdicts_B3: tokens accepted, proposals
    rejected, and tokens proposed, since the last call of `new_verdicts`. seconds_B: seconds of the passes that the row
    took part in. prefill_tokens_B, prefill_seconds_B: tokens that prefill passes fed, and seconds of these passes.
    """

    def __init__(self, rows: int) -> None:
        self.proposed_B, self.accepted_B, self.rejected_B, self.passes_B = np.zeros((4, rows), dtype=np.int64)
        self.prefill_tokens_B = np.zeros(rows, dtype=np.int64)
        self.accepted_BN = np.zeros((rows, 1), dtype=np.int64)
        self.seconds_B = np.zeros(rows)
        self.prefill_seconds_B = np.zeros(rows)
        self.verdicts_B3 = np.zeros((rows, 3), dtype=np.int64)
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=MAX_PASSES)

    @property
    def _row_fields(self) -> list[str]:
        """Names of the attributes with a row dimension: all but the latest passes."""
        return [name for name in vars(self) if name != "_passes"]

    def record_passes(
        self, live_B: Bools, seconds: float, width: int = 1, passes: int = 1, continued: bool = False
    ) -> None:
        """Record `passes` passes of `width` columns for the live rows.

        continued: the passes belong to the proposal of the latest record, and are added to that record.
        """
        self.passes_B += passes * live_B
        self.seconds_B += seconds * live_B
        tokens = width * passes
        rows = int(live_B.sum())
        if continued and self._passes:
            old_tokens, rows, old_seconds = self._passes.pop()
            tokens = tokens + old_tokens
            seconds = seconds + old_seconds
        self._passes.append((tokens, rows, seconds))

    def new_passes(self) -> list[tuple[int, int, float]]:
        """Return the passes and fused drafts since the last call, each as (tokens of a row, rows, seconds)."""
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
        for name in self._row_fields:
            setattr(self, name, getattr(self, name)[list(rows)])

    def join(self, other: Counters) -> None:
        """Append the rows of `other`."""
        self._widen(other.accepted_BN.shape[1])
        other._widen(self.accepted_BN.shape[1])
        for name in self._row_fields:
            setattr(self, name, np.concatenate((getattr(self, name), getattr(other, name))))

    def swap_out(self, b: int) -> dict[str, Any]:
        """Return the counts of a row for `swap_in`. `SequenceBatch.keep` gives the verdicts to the planner."""
        return {name: getattr(self, name)[b].copy() for name in self._row_fields if name != "verdicts_B3"}

    def swap_in(self, b: int, counts: dict[str, Any]) -> None:
        """Continue with these counts in row b, which is new."""
        self._widen(len(counts["accepted_BN"]))
        for name, count in counts.items():
            row = getattr(self, name)[b : b + 1].reshape(-1)
            row[: np.size(count)] = count

    def _widen(self, columns: int) -> None:
        if (extra_columns := columns - self.accepted_BN.shape[1]) > 0:
            self.accepted_BN = np.pad(self.accepted_BN, ((0, 0), (0, extra_columns)))
