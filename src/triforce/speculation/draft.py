"""The two nouns of speculation: the text so far, and a guess at how it goes on.

What decides what to do next (tokens, counts, lengths) is on the host, in numpy; laws stay where they were computed.
Shape suffixes: B rows, S text capacity, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triforce.ragged import Bools, Ints, columns, rows, there


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The ids of each row so far. Ids at or past `lengths_B` are scratch, free to be overwritten."""

    ids_BS: Ints
    lengths_B: Ints

    def append(self, draft: Draft) -> SequenceState:
        """This text with each row's drafted tokens behind it. Shares `ids_BS`: only scratch is written."""
        B, width = draft.tokens_BK.shape
        if width == 0:
            return self
        # Padding of a row at the end of its capacity has no place to go; it is folded onto the last column, which is
        # scratch because a text is never filled to the brim (see batch.py).
        at_BK = np.minimum(columns(self.lengths_B, width), self.ids_BS.shape[1] - 1)
        self.ids_BS[rows(B), at_BK] = draft.tokens_BK
        return SequenceState(self.ids_BS, self.lengths_B + draft.counts_B)

    def select(self, rows: Sequence[int]) -> SequenceState:
        """Some of the rows."""
        return SequenceState(self.ids_BS[list(rows)], self.lengths_B[list(rows)])

    def join(self, other: SequenceState) -> SequenceState:
        """These rows, and behind them those of another text."""
        width = max(self.ids_BS.shape[1], other.ids_BS.shape[1])
        both = [np.pad(x.ids_BS, ((0, 0), (0, width - x.ids_BS.shape[1]))) for x in (self, other)]
        return SequenceState(np.concatenate(both), np.concatenate((self.lengths_B, other.lengths_B)))


@dataclass(frozen=True, slots=True)
class Draft:
    """Next tokens of each row, the law each was drawn from and the tier that drew it. Past `counts_B` is padding.

    `laws_BKV` is what the coupling of the tier above asks for: under `rejection` the float64 distribution of each
    token, under `seeded` nothing at all (V = 0).
    """

    tokens_BK: Ints
    laws_BKV: Tensor
    origins_BK: Ints
    counts_B: Ints

    @staticmethod
    def empty(count: int, law_size: int) -> Draft:
        """No guess, for so many rows."""
        nothing_BK = np.zeros((count, 0), dtype=np.int64)
        laws_BKV = torch.zeros(count, 0, law_size, dtype=torch.float64)
        return Draft(nothing_BK, laws_BKV, nothing_BK, np.zeros(count, dtype=np.int64))

    def then(self, step: Draft, live_B: Bools) -> Draft:
        """This draft with `step` behind it, in the rows that are live."""
        counts_B = self.counts_B + step.counts_B * live_B
        tokens_BK, laws_BKV, origins_BK = step.tokens_BK, step.laws_BKV, step.origins_BK
        if self.tokens_BK.shape[1]:
            at_BK = columns(self.counts_B, tokens_BK.shape[1])
            tokens_BK, origins_BK = (
                _put(np.concatenate((before, after), 1), at_BK, after)
                for before, after in ((self.tokens_BK, tokens_BK), (self.origins_BK, origins_BK))
            )
            laws_BKV = _laws(self.laws_BKV, laws_BKV, at_BK)
        longest = int(counts_B.max())
        if longest < tokens_BK.shape[1]:
            tokens_BK, origins_BK, laws_BKV = tokens_BK[:, :longest], origins_BK[:, :longest], laws_BKV[:, :longest]
        return Draft(tokens_BK, laws_BKV, origins_BK, counts_B)


def _put(cells_BK: Ints, at_BJ: Ints, values_BJ: Ints) -> Ints:
    cells_BK[rows(len(cells_BK)), at_BJ] = values_BJ
    return cells_BK


def _laws(before_BKV: Tensor, after_BJV: Tensor, at_BJ: Ints) -> Tensor:
    both_BKV = torch.cat((before_BKV.to(after_BJV.device), after_BJV), 1)
    if both_BKV.shape[2]:
        at_BJ1 = there(at_BJ, both_BKV.device)[..., None]
        both_BKV.scatter_(1, at_BJ1.expand_as(after_BJV), after_BJV)
    return both_BKV
