"""The exact view: every committed page. It owns the committed length and reports where attention went.

Shape suffixes: B rows, T tokens fed in one pass, J scored columns, V vocabulary, L layers, H query heads, G KV heads,
U units, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce.backends.dispatch import PAGE, ForwardBatch, ModelBackend, PageTable
from triforce.kvcache.pool import PagePool
from triforce.kvcache.retrieval_config import Budget
from triforce.kvcache.swap import SwappedKV, put_row_back, take_row
from triforce.kvcache.views.observation import AttentionObservation
from triforce.ragged import Ints

OBSERVED = 80
"""Passes of at most so many tokens a row report what they saw. No verification is wider; the rest is prefill."""

PREFILL, PREFILL_ON_CPU = 8192, 512
"""Tokens of a prompt fed in one pass: on a CPU few, as their activations then stay in cache and memory."""

TAIL = 16
"""A prompt's last tokens are fed apart, so that the first selection has queries to go by."""


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prompt between two places where its passes end, both multiples of this, wherever it begins."""
    return PREFILL_ON_CPU if device.type == "cpu" else PREFILL


class FullView:
    """All tokens of rows `rows` of a pool. Its length is the pool's committed length.

    `grain`: tokens of the units whose attention mass somebody asks for, which costs a little; 0 where nobody does.
    By default the pool's.
    """

    def __init__(
        self,
        pool: PagePool,
        sights: list[AttentionObservation] | None = None,
        rows: range | None = None,
        grain: int | None = None,
    ) -> None:
        self.pool, self.grain = pool, pool.unit if grain is None else grain
        self.rows = rows if rows is not None else range(len(pool.tables))
        self.sights = sights if sights is not None else [AttentionObservation() for _ in pool.tables]
        self.budget: Budget | None = None
        """What a view reads that selects by what this one saw: so much is to stay at hand where KV is offloaded."""
        self._pass: ForwardBatch | None = None

    @property
    def lengths_B(self) -> Ints:
        return self.pool.lengths_B[self.rows.start : self.rows.stop]

    def begin(self, counts_B: Ints, width: int) -> None:
        starts, unit, observe = self.lengths_B.tolist(), self.grain or PAGE, width <= OBSERVED
        lists = PageTable(self.pool.units(self.rows, unit), starts, counts_B.tolist(), unit)
        weigh = observe and self.grain > 0
        keep = max(map(self.budget.of, starts)) // PAGE if self.budget and self.pool.offloaded and observe else 0
        views = [(self.pool.config.layers, lists)]
        tables = self.pool.tables[self.rows.start : self.rows.stop]
        self._pass = ForwardBatch(starts, views, observe, weigh, self.pool.least, exact=True, keep=keep, tables=tables)

    def forward(self, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None) -> Tensor:
        this = self._pass
        assert this is not None, "begin() comes before forward()"
        logits_BJV, queries_LBTHD, mass_LBGU = self.pool.memory.forward(model, ids_BT, at_BJ, this)
        if queries_LBTHD is not None:
            lists = this.views[0][1]
            for i, (b, start, count) in enumerate(zip(self.rows, lists.starts, lists.counts, strict=True)):
                if count:
                    mass_LGU = mass_LBGU[:, i] if mass_LBGU is not None else None
                    passes = self.sights[b].passes + 1
                    self.sights[b] = AttentionObservation(
                        start, passes, lists.unit, queries_LBTHD[:, i, :count], mass_LGU
                    )
        return logits_BJV

    def read(self, model: ModelBackend, ids_1T: Tensor) -> Iterator[int]:
        """The pass that `begin` told of, of one row, unscored, where KV is offloaded: see `OffloadedKVBackend.read`."""
        assert self._pass is not None and self.pool.offloaded is not None, "this is for offloaded memory"
        return self.pool.offloaded.read(model, ids_1T, self._pass)

    def advance(self, counts_B: Ints) -> None:
        self.pool.lengths_B[self.rows.start : self.rows.stop] += counts_B

    def rewind(self, lengths_B: Ints) -> None:
        np.minimum(self.lengths_B, lengths_B, out=self.lengths_B)

    def resume(self, length: int) -> tuple[int, int]:
        seen = int(self.lengths_B[0])
        tail = max(seen, length - TAIL)
        chunk = prefill_chunk(self.pool.device)
        if self.pool.offloaded:  # read layer by layer, each of which all tokens go through
            return seen, tail if seen < tail else length
        return seen, min((seen // chunk + 1) * chunk, tail) if seen < tail else length

    def row(self, b: int) -> FullView:
        one = FullView(self.pool, self.sights, range(self.rows[b], self.rows[b] + 1), self.grain)
        one.budget = self.budget
        return one

    def select(self, rows: Sequence[int]) -> None:
        self.pool.select(rows)
        self.sights[:] = [self.sights[b] for b in rows]
        self.rows = range(len(rows))

    def join(self, other: FullView) -> None:
        self.pool.join(other.pool)
        self.sights += other.sights
        self.rows = range(len(self.sights))

    def swap_out(self, b: int) -> SwappedKV:
        """What a row holds, for `swap_in`."""
        return take_row(self.pool, self.rows[b], self.sights[self.rows[b]])

    def swap_in(self, b: int, seen: SwappedKV) -> None:
        """Let a fresh row, whose pages are reserved, go on as the one that was swapped out."""
        put_row_back(self.pool, self.rows[b], seen)
        self.sights[self.rows[b]] = seen.sight

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row, whose pages are reserved, see what another row has seen."""
        length = int(self.pool.lengths_B[source])
        slots_N = self.pool.slots(row, 0, length)
        for layer in range(self.pool.config.layers):
            self.pool.memory.put(layer, slots_N, *self.pool.span(layer, source, 0, length))
        self.pool.lengths_B[row] = length
        self.sights[row] = self.sights[source]
