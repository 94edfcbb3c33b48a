"""The exact view: every committed page. It owns the committed length and reports where attention went.

Shape suffixes: B rows, T tokens fed in one pass, H query heads, G KV heads, U units, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.cache.paged import Pass, Sight
from triforce.cache.pool import Pool
from triforce.kernels import PAGE, Lists

OBSERVED = 80
"""Passes of at most so many tokens a row report their attention mass. No verification is wider; the rest is prefill."""

PREFILL, PREFILL_ON_CPU = 8192, 512
"""Tokens of a prompt fed in one pass: on a CPU few, as their activations then stay in cache and memory."""

TAIL = 16
"""A prompt's last tokens are fed apart, so that the first selection has queries to go by."""


class Full:
    """All tokens of rows `rows` of a pool. Its length is the pool's committed length.

    `grain`: tokens of the units whose attention mass somebody asks for, which costs a little; 0 where nobody does.
    By default the pool's.
    """

    def __init__(
        self, pool: Pool, sights: list[Sight] | None = None, rows: range | None = None, grain: int | None = None
    ) -> None:
        self.pool, self.grain = pool, pool.unit if grain is None else grain
        self.rows = rows if rows is not None else range(len(pool.tables))
        self.sights = sights if sights is not None else [Sight() for _ in pool.tables]
        self._pass: Pass | None = None
        self._lists: Lists | None = None

    @property
    def lengths_B(self) -> Tensor:
        return self.pool.lengths_B[self.rows.start : self.rows.stop]

    def begin(self, counts_B: Tensor, width: int) -> None:
        this = self._pass = Pass.over(self.pool, self.rows, self.lengths_B, counts_B, width)
        unit = self.grain or PAGE
        self._lists = Lists(self.pool.units(self.rows, unit), this.starts, this.counts, unit)
        for b, start, count in zip(self.rows, this.starts, this.counts, strict=True):
            if 0 < count <= OBSERVED:
                self.sights[b] = Sight(start, self.sights[b].passes + 1, unit)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        this, lists = self._pass, self._lists
        assert this is not None and lists is not None, "begin() comes before attend()"
        q_BTHD = this.write(self.pool, layer, q_BTHD, k_BTGD, v_BTGD)
        weigh = self.grain > 0 and q_BTHD.shape[1] <= OBSERVED
        mixed_BTHD, mass_BGU = self.pool.memory.attend(layer, q_BTHD, lists, weigh)
        for i, (b, count) in enumerate(zip(self.rows, this.counts, strict=True)):
            if 0 < count <= OBSERVED:
                self.sights[b].queries[layer] = q_BTHD[i, :count]
                if weigh:
                    self.sights[b].mass[layer] = mass_BGU[i]
        return mixed_BTHD

    def advance(self, counts_B: Tensor) -> None:
        self.lengths_B.add_(counts_B)

    def rewind(self, lengths_B: Tensor) -> None:
        self.lengths_B.copy_(torch.minimum(self.lengths_B, lengths_B))

    def resume(self, length: int) -> tuple[int, int]:
        seen = int(self.lengths_B)
        tail = max(seen, length - TAIL)
        chunk = PREFILL_ON_CPU if self.pool.device.type == "cpu" else PREFILL
        return seen, min(seen + chunk, tail) if seen < tail else length

    def row(self, b: int) -> Full:
        return Full(self.pool, self.sights, range(self.rows[b], self.rows[b] + 1), self.grain)

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row, whose pages are reserved, see what another row has seen."""
        length = int(self.pool.lengths_B[source])
        slots_N = self.pool.slots(row, 0, length)
        for layer in range(self.pool.config.layers):
            self.pool.memory.put(layer, slots_N, *self.pool.span(layer, source, 0, length))
        self.pool.lengths_B[row] = length
        self.sights[row] = self.sights[source]
