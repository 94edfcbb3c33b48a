"""H2O (Zhang et al. 2023): keep the tokens that drew the most attention so far, and the latest ones, half and half.

Its scores are sums over all queries, those of the prompt included, and what was dropped does not come back. Here it
keeps whole chunks, each KV head its own, and goes by exact attention, which an evicting decoder does not know.
L layers, G KV heads, U units, N chunks.
"""

from __future__ import annotations

import numpy as np
import torch

from triforce.arrays import Array, namespace
from triforce.backends.decoder import Decoder
from triforce.kvcache import FullView
from triforce.kvcache.selection import best
from triforce.kvcache.views.full import MAX_OBSERVED_TOKENS
from triforce.ragged import Ints, ints


class HeavyHitters:
    """`mass_LGU`: attention that the units of the prompt drew while it was read."""

    observes = True

    def __init__(self, mass_LGU: Array) -> None:
        xp = namespace(mass_LGU)
        self._mass_LGU = mass_LGU
        self._passes = 0
        self._gone_LGN = xp.zeros((*mass_LGU.shape[:2], 0), dtype=xp.bool, device=mass_LGU.device)

    def latest_tokens(self, budget: int) -> int:
        return budget // 2

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        self._see(full, row)
        units = chunk // full.pool.unit
        mass_LGU = _widened(self._mass_LGU, candidates.stop * units)[..., : candidates.stop * units]
        L, G, _ = mass_LGU.shape
        xp = namespace(mass_LGU)
        mass_LGN = xp.sum(mass_LGU.reshape(L, G, candidates.stop, units), axis=3)
        gone_LGN = _widened(self._gone_LGN, candidates.stop)
        picked_LGN = best(xp.where(gone_LGN, -1.0, mass_LGN), candidates, picks)
        self._gone_LGN = xp.ones_like(gone_LGN)
        layers, heads = (xp.arange(count, device=mass_LGU.device) for count in (L, G))
        self._gone_LGN[layers[:, None, None], heads[:, None], picked_LGN] = False
        return picked_LGN

    def _see(self, full: FullView, row: int) -> None:
        """Add what the last verification saw; the first thing seen is the end of the prompt, which is there already."""
        observation = full.observations[row]
        if self._passes and observation.passes != self._passes and observation.mass_LGU is not None:
            self._mass_LGU = added(self._mass_LGU, observation.mass_LGU)
        self._passes = observation.passes


@torch.no_grad()
def attended(model: Decoder, full: FullView, ids_1S: Ints) -> Array:
    """Let an exact view see what it has not seen of a text; the attention that each unit drew meanwhile, (L, G, U)."""
    full.observe(full.pool.unit)
    sum_LGU = full.pool.array(np.zeros((1, 1, 0), np.float32))
    for start in range(int(full.lengths_B[0]), ids_1S.shape[1], MAX_OBSERVED_TOKENS):
        ids_1T = ids_1S[:, start : start + MAX_OBSERVED_TOKENS]
        model(ids_1T, ints([ids_1T.shape[1]]), full, ids_1T[:, :0])
        mass_LGU = full.observations[0].mass_LGU
        assert mass_LGU is not None, "passes of that width are observed"
        seen_LGU = mass_LGU[..., : -(-int(full.lengths_B[0]) // full.grain)]
        sum_LGU = _widened(sum_LGU, seen_LGU.shape[2]) + seen_LGU
    return sum_LGU


def added(a_LGU: Array, b_LGU: Array) -> Array:
    """The sum of what was drawn at different times, by fewer and by more units."""
    units = max(a_LGU.shape[2], b_LGU.shape[2])
    return _widened(a_LGU, units) + _widened(b_LGU, units)


def _widened(values_LGU: Array, units: int) -> Array:
    xp = namespace(values_LGU)
    shape = *values_LGU.shape[:2], max(0, units - values_LGU.shape[2])
    return xp.concat([values_LGU, xp.zeros(shape, dtype=values_LGU.dtype, device=values_LGU.device)], axis=2)
