"""Summaries of committed chunks, extended as the text grows. G KV heads, N chunks, C tokens of a chunk, D head size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triforce.cache.full import Full


class Summaries:
    """What `summarise` makes of the keys of full committed chunks, (G, N, C, D) to (G, N, ...), per row and layer."""

    def __init__(self, summarise: Callable[[Tensor], Tensor]) -> None:
        self.summarise = summarise
        self._known: dict[tuple[int, int], Tensor] = {}

    def of(self, full: Full, row: int, layer: int, chunk: int, chunks: int) -> Tensor:
        """Summaries of the first `chunks` chunks, all of which must be full and committed."""
        known = self._known.get((row, layer))
        have = known.shape[1] if known is not None else 0
        if have < chunks:
            keys_GSD, _ = full.pool.span(layer, row, have * chunk, chunks * chunk)
            new = self.summarise(keys_GSD.float().reshape(len(keys_GSD), chunks - have, chunk, -1))
            known = new if known is None else torch.cat([known, new], 1)
            self._known[row, layer] = known
        assert known is not None
        return known[:, :chunks]


def last_query(full: Full, row: int, layer: int) -> Tensor:
    """The query of the last committed token, by KV head: float32 (G, H / G, D)."""
    query_HD = full.sights[row].query(layer, int(full.pool.lengths_B[row]) - 1).float()
    return query_HD.view(full.pool.config.kv_heads, -1, full.pool.config.head_dim)
