"""H2O (Zhang et al. 2023): keep the tokens that drew the most attention so far, and the latest ones, half and half.

Its scores are sums over all queries, those of the prompt included, and what was dropped does not come back. Here it
keeps whole chunks, each KV head its own, and goes by exact attention, which an evicting decoder does not know.
L layers, G KV heads, U units, N chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.kvcache import FullView
from triforce.kvcache.selection import best
from triforce.kvcache.views.full import OBSERVED
from triforce.ragged import Ints, ints


class HeavyHitters:
    """`mass_LGU`: attention that the units of the prompt drew while it was read."""

    observes = True

    def __init__(self, mass_LGU: Tensor) -> None:
        self._mass_LGU = mass_LGU
        self._passes = 0
        self._gone_LGN = torch.zeros(*mass_LGU.shape[:2], 0, dtype=torch.bool, device=mass_LGU.device)

    def latest(self, budget: int) -> int:
        return budget // 2

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        self._see(full, row)
        units = chunk // full.pool.unit
        mass_LGU = _widened(self._mass_LGU, candidates.stop * units)[..., : candidates.stop * units]
        mass_LGN = mass_LGU.reshape(*mass_LGU.shape[:2], candidates.stop, units).sum(3)
        gone_LGN = _widened(self._gone_LGN, candidates.stop)
        picked_LGN = best(mass_LGN.masked_fill(gone_LGN, -1.0), candidates, picks)
        self._gone_LGN = torch.ones_like(gone_LGN).scatter_(2, picked_LGN, False)
        return picked_LGN

    def _see(self, full: FullView, row: int) -> None:
        """Add what the last verification saw; the first thing seen is the end of the prompt, which is there already."""
        observation = full.observations[row]
        if self._passes and observation.passes != self._passes and observation.mass_LGU is not None:
            self._mass_LGU = added(self._mass_LGU, observation.mass_LGU)
        self._passes = observation.passes


@torch.no_grad()
def attended(model: Decoder, full: FullView, ids_1S: Ints) -> Tensor:
    """Let an exact view see what it has not seen of a text; the attention that each unit drew meanwhile, (L, G, U)."""
    full.observe(full.pool.unit)
    sum_LGU = torch.zeros(1, 1, 0)
    for start in range(int(full.lengths_B[0]), ids_1S.shape[1], OBSERVED):
        ids_1T = torch.from_numpy(ids_1S[:, start : start + OBSERVED]).to(full.pool.device)
        count_1 = ints([ids_1T.shape[1]])
        model(ids_1T, count_1, full, ids_1T.new_zeros(1, 0))
        mass_LGU = full.observations[0].mass_LGU
        assert mass_LGU is not None, "passes of that width are observed"
        seen_LGU = mass_LGU[..., : -(-int(full.lengths_B[0]) // full.grain)]
        sum_LGU = _widened(sum_LGU.to(seen_LGU), seen_LGU.shape[2]) + seen_LGU
    return sum_LGU


def added(a_LGU: Tensor, b_LGU: Tensor) -> Tensor:
    """The sum of what was drawn at different times, by fewer and by more units."""
    units = max(a_LGU.shape[2], b_LGU.shape[2])
    return _widened(a_LGU, units) + _widened(b_LGU, units)


def _widened(values_LGU: Tensor, units: int) -> Tensor:
    return F.pad(values_LGU, (0, max(0, units - values_LGU.shape[2])))
