"""Summaries of committed chunks, extended as the text grows.

L layers, G KV heads, N chunks, C tokens of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triforce.kvcache.views.full import FullView


class Summaries:
    """Results of `summarise` over keys of one row's full committed chunks, by layer: (G, N, C, D) to (G, N, ...)."""

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
