"""Select by the product of the last query with each chunk's mean key, as the paper does (Sun et al. 2024, section 4.1).

With grouped queries, the scores of a group are added. L layers, G KV heads, N chunks, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.kvcache.selection.summaries import Summaries, last_query
from triforce.kvcache.selection.topk import best, recent_share
from triforce.kvcache.views.full import FullView


class MeanKey:
    observes = False

    def __init__(self) -> None:
        self.means = Summaries(lambda keys_GNCD: keys_GNCD.mean(2))

    def latest(self, budget: int) -> int:
        return recent_share(budget)

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        means_LGND = self.means.of(full, row, chunk, candidates.stop)
        query_LGD = last_query(full, row).sum(2)
        return best(torch.einsum("lgnd,lgd->lgn", means_LGND, query_LGD), candidates, picks)
