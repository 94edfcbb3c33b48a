"""Select by the attention that the last verification itself gave each chunk: free, since it has computed it.

The idea is that of SparseSpec and Vegas (2026). G KV heads, U units.
"""

from __future__ import annotations

from torch import Tensor

from triforce.cache.full import Full
from triforce.cache.select.best import best, recent_share


class Observed:
    observes = True

    def recent(self, budget: int) -> int:
        return recent_share(budget)

    def pick(self, full: Full, row: int, layer: int, chunk: int, candidates: range, picks: int) -> Tensor:
        sight = full.sights[row]
        mass_GU = sight.mass[layer][:, : candidates.stop * chunk // sight.grain]
        return best(mass_GU.reshape(len(mass_GU), candidates.stop, -1).sum(2), candidates, picks)
