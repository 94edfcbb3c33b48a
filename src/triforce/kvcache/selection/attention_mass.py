"""Select by the attention that the last verification itself gave each chunk: free, since it has computed it.

The idea is that of SparseSpec and Vegas (2026). L layers, G KV heads, U units.
"""

from __future__ import annotations

from torch import Tensor

from triforce.kvcache.selection.topk import best, recent_share
from triforce.kvcache.views.full import FullView


class Observed:
    observes = True

    def latest(self, budget: int) -> int:
        return recent_share(budget)

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        observation = full.observations[row]
        assert observation.mass_LGU is not None, "the exact view was not asked to observe"
        if observation.grain == chunk:
            return best(observation.mass_LGU, candidates, picks)
        mass_LGU = observation.mass_LGU[..., : candidates.stop * chunk // observation.grain]
        return best(mass_LGU.reshape(*mass_LGU.shape[:2], candidates.stop, -1).sum(3), candidates, picks)
