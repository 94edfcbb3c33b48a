"""Selection policies: which chunks of the context a retrieval view reads.

A policy belongs to one row of a retrieval view and may remember summaries of it. Shape suffixes: L layers, G KV heads,
h query heads of a group, N chunks, C tokens of a chunk, D head size, U units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE
from triforce.kvcache.views.full import FullView

RECENT_SHARE = 8
"""A scoring policy gives one part in so many of the budget to the latest tokens."""


class Policy(Protocol):
    """Chunk c of a row holds its tokens [c * chunk, (c + 1) * chunk)."""

    observes: bool = False
    """Whether it needs the attention mass of verifications."""

    def latest(self, budget: int) -> int:
        """Count the tokens of `budget` that go to the latest ones, whatever they are."""
        return budget // RECENT_SHARE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        """Ids of the best committed chunks among `candidates`, ascending, by layer and KV head: int64 (L, G, picks)."""


class Observed(Policy):
    """The attention that the last verification itself gave each chunk: free (as in SparseSpec and Vegas, 2026)."""

    observes = True

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        observation = full.observations[row]
        assert observation.mass_LGU is not None, "the exact view was not asked to observe"
        if observation.grain == chunk:
            return best(observation.mass_LGU, candidates, picks)
        mass_LGU = observation.mass_LGU[..., : candidates.stop * chunk // observation.grain]
        return best(mass_LGU.reshape(*mass_LGU.shape[:2], candidates.stop, -1).sum(3), candidates, picks)


class MeanKey(Policy):
    """The product of the last query with each chunk's mean key, added over a group (Sun et al. 2024, section 4.1)."""

    def __init__(self) -> None:
        self.means = Summaries(lambda keys_GNCD: keys_GNCD.mean(2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        means_LGND = self.means.of(full, row, chunk, candidates.stop)
        query_LGD = last_query(full, row).sum(2)
        return best(torch.einsum("lgnd,lgd->lgn", means_LGND, query_LGD), candidates, picks)


class Quest(Policy):
    """An upper bound of the product of the last query with any key of a chunk (Quest, Tang et al. 2024)."""

    def __init__(self) -> None:
        self.bounds = Summaries(lambda keys_GNCD: torch.stack([keys_GNCD.amin(2), keys_GNCD.amax(2)], 2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        least_LGND, most_LGND = self.bounds.of(full, row, chunk, candidates.stop).unbind(3)
        query_LGhD = last_query(full, row)
        high_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_min(0), most_LGND)
        low_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_max(0), least_LGND)
        return best((high_LGhN + low_LGhN).sum(2), candidates, picks)


class Recent(Policy):
    """Sinks and the latest tokens, and nothing else: StreamingLLM (Xiao et al. 2024) over the target's own pages."""

    def latest(self, budget: int) -> int:
        return budget - PAGE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        config = full.pool.config
        return torch.zeros(config.layers, config.kv_heads, 0, dtype=torch.long, device=full.pool.device)


POLICIES: dict[str, Callable[[], Policy]] = {"observed": Observed, "mean_key": MeanKey, "quest": Quest}
"""The selections a user may ask for. `Recent` is the `streaming` mode's."""


class Summaries:
    """Results of `summarise`, (G, N, C, D) to (G, N, ...), by layer: of one row's full chunks, extended as it grows."""

    def __init__(self, summarise: Callable[[Tensor], Tensor]) -> None:
        self.summarise = summarise
        self._known: Tensor | None = None

    def of(self, full: FullView, row: int, chunk: int, chunks: int) -> Tensor:
        """Summaries of the first `chunks` chunks, all of which must be full and committed: (L, G, N, ...)."""
        known, layers = self._known, full.pool.config.layers
        have = known.shape[2] if known is not None else 0
        if have < chunks:
            new = torch.stack([self._new(full, row, layer, chunk, have, chunks) for layer in range(layers)])
            known = self._known = new if known is None else torch.cat([known, new], 2)
        assert known is not None
        return known[:, :, :chunks]

    def _new(self, full: FullView, row: int, layer: int, chunk: int, start: int, stop: int) -> Tensor:
        keys_GSD, _ = full.pool.span(layer, row, start * chunk, stop * chunk)
        return self.summarise(keys_GSD.float().reshape(len(keys_GSD), stop - start, chunk, -1))


def last_query(full: FullView, row: int) -> Tensor:
    """The query of the last committed token, by layer and KV head: float32 (L, G, H / G, D)."""
    config = full.pool.config
    query_LHD = full.observations[row].query(int(full.pool.lengths_B[row]) - 1).float()
    return query_LHD.view(config.layers, config.kv_heads, -1, config.head_dim)


def best(scores_LGN: Tensor, candidates: range, picks: int) -> Tensor:
    """Return ids (L, G, picks) of the highest scores among `candidates`, ascending: memory is read in order."""
    return dispatch.best(scores_LGN.flatten(0, 1), candidates, picks).view(*scores_LGN.shape[:2], picks)
