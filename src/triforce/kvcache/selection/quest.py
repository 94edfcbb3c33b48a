"""Select by an upper bound of the product of the last query with any key of a chunk (Quest, Tang et al. 2024).

L layers, G KV heads, h query heads of a group, N chunks, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.kvcache.selection.summaries import Summaries, last_query
from triforce.kvcache.selection.topk import best, recent_share
from triforce.kvcache.views.full import FullView


class Quest:
    observes = False

    def __init__(self) -> None:
        self.bounds = Summaries(lambda keys_GNCD: torch.stack([keys_GNCD.amin(2), keys_GNCD.amax(2)], 2))

    def latest(self, budget: int) -> int:
        return recent_share(budget)

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        least_LGND, most_LGND = self.bounds.of(full, row, chunk, candidates.stop).unbind(3)
        query_LGhD = last_query(full, row)
        high_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_min(0), most_LGND)
        low_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_max(0), least_LGND)
        return best((high_LGhN + low_LGhN).sum(2), candidates, picks)
