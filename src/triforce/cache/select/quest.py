"""Select by an upper bound of the product of the last query with any key of a chunk (Quest, Tang et al. 2024).

G KV heads, h query heads of a group, N chunks, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.cache.full import Full
from triforce.cache.select.best import best, recent_share
from triforce.cache.select.summary import Summaries, last_query


class Quest:
    observes = False

    def __init__(self) -> None:
        self.bounds = Summaries(lambda keys_GNCD: torch.stack([keys_GNCD.amin(2), keys_GNCD.amax(2)], 2))

    def recent(self, budget: int) -> int:
        return recent_share(budget)

    def pick(self, full: Full, row: int, layer: int, chunk: int, candidates: range, picks: int) -> Tensor:
        least_GND, most_GND = self.bounds.of(full, row, layer, chunk, candidates.stop).unbind(2)
        query_GhD = last_query(full, row, layer)
        high_GhN = torch.einsum("ghd,gnd->ghn", query_GhD.clamp_min(0), most_GND)
        low_GhN = torch.einsum("ghd,gnd->ghn", query_GhD.clamp_max(0), least_GND)
        return best((high_GhN + low_GhN).sum(1), candidates, picks)
