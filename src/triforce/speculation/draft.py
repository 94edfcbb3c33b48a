"""The two nouns of speculation: the text so far, and a guess at how it goes on.

Shape suffixes: B rows, S text capacity, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.shapes import columns


@dataclass(frozen=True, slots=True)
class Prefix:
    """The ids of each row so far, int64. Ids at or past `lengths_B` are scratch, free to be overwritten."""

    ids_BS: Tensor
    lengths_B: Tensor

    def append(self, draft: Draft) -> Prefix:
        """This text with each row's drafted tokens behind it. Shares `ids_BS`: only scratch is written."""
        width = draft.tokens_BK.shape[1]
        if width == 0:
            return self
        # Padding of a row at the end of its capacity has no place to go; it is folded onto the last column, which is
        # scratch because a text is never filled to the brim (see engine.py).
        at_BK = columns(self.lengths_B, width).clamp_max(self.ids_BS.shape[1] - 1)
        self.ids_BS.scatter_(1, at_BK, draft.tokens_BK)
        return Prefix(self.ids_BS, self.lengths_B + draft.counts_B)

    def row(self, b: int) -> Prefix:
        """Row b alone, on the same storage."""
        return Prefix(self.ids_BS[b : b + 1], self.lengths_B[b : b + 1])


@dataclass(frozen=True, slots=True)
class Draft:
    """Next tokens of each row, the law each was drawn from and the tier that drew it. Past `counts_B` is padding.

    `laws_BKV` is what the coupling of the tier above asks for: under `rejection` the float64 distribution of each
    token, under `seeded` nothing at all (V = 0).
    """

    tokens_BK: Tensor
    laws_BKV: Tensor
    origins_BK: Tensor
    counts_B: Tensor

    @staticmethod
    def empty(lengths_B: Tensor, law_size: int) -> Draft:
        """No guess, for as many rows as `lengths_B` has."""
        nothing_BK = lengths_B.new_zeros(len(lengths_B), 0)
        laws_BKV = torch.zeros(len(lengths_B), 0, law_size, dtype=torch.float64, device=lengths_B.device)
        return Draft(nothing_BK, laws_BKV, nothing_BK, torch.zeros_like(lengths_B))

    def then(self, step: Draft, live_B: Tensor) -> Draft:
        """This draft with `step` behind it, in the rows that are live."""
        counts_B = self.counts_B + step.counts_B * live_B
        tokens_BK, laws_BKV, origins_BK = step.tokens_BK, step.laws_BKV, step.origins_BK
        if self.tokens_BK.shape[1]:
            at_BK = columns(self.counts_B, tokens_BK.shape[1])
            at_BKV = at_BK[..., None].expand_as(laws_BKV)
            tokens_BK = torch.cat((self.tokens_BK, tokens_BK), 1).scatter_(1, at_BK, tokens_BK)
            origins_BK = torch.cat((self.origins_BK, origins_BK), 1).scatter_(1, at_BK, origins_BK)
            laws_BKV = torch.cat((self.laws_BKV, laws_BKV), 1).scatter_(1, at_BKV, laws_BKV)
        longest = int(counts_B.max())
        if longest < tokens_BK.shape[1]:
            tokens_BK, laws_BKV, origins_BK = (x[:, :longest] for x in (tokens_BK, laws_BKV, origins_BK))
        return Draft(tokens_BK, laws_BKV, origins_BK, counts_B)
