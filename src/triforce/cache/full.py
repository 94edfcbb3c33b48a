"""The exact view: every committed page. It owns the committed length and reports where attention went.

Shape suffixes: B rows, T tokens fed in one pass, H query heads, G KV heads, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.cache.paged import Pass, Sight
from triforce.cache.pool import Pool
from triforce.kernels import attend, attend_causal

OBSERVED = 80
"""Passes of at most so many tokens a row report their attention mass. No verification is wider; the rest is prefill."""

PREFILL, PREFILL_ON_CPU = 8192, 512
"""Tokens of a prompt fed in one pass: on a CPU few, as their activations then stay in cache and memory."""

TAIL = 16
"""A prompt's last tokens are fed apart, so that the first selection has queries to go by."""


class Full:
    """All tokens of rows `rows` of a pool. Its length is the pool's committed length.

    `observes`: whether somebody asks for the mass of each key, which costs a little.
    """

    def __init__(
        self, pool: Pool, sights: list[Sight] | None = None, rows: range | None = None, observes: bool = True
    ) -> None:
        self.pool, self.observes = pool, observes
        self.rows = rows if rows is not None else range(len(pool.tables))
        self.sights = sights if sights is not None else [Sight() for _ in pool.tables]
        self._pass: Pass | None = None

    @property
    def lengths_B(self) -> Tensor:
        return self.pool.lengths_B[self.rows.start : self.rows.stop]

    def begin(self, counts_B: Tensor, width: int) -> None:
        self._pass = Pass.over(self.pool, self.rows, self.lengths_B, counts_B, width)
        for i, b in enumerate(self.rows):
            if 0 < self._pass.counts[i] <= OBSERVED:
                self.sights[b] = Sight(self._pass.starts[i], self.sights[b].passes + 1)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        this = self._pass
        assert this is not None, "begin() comes before attend()"
        q_BTHD = this.write(self.pool, layer, q_BTHD, k_BTGD, v_BTGD)
        mixed_BTHD = torch.zeros_like(q_BTHD)
        for i, (start, count) in enumerate(zip(this.starts, this.counts, strict=True)):
            if count:
                mixed_BTHD[i, :count] = self._row(layer, self.rows[i], q_BTHD[i, :count], start + count)
        return mixed_BTHD

    def _row(self, layer: int, b: int, q_THD: Tensor, stop: int) -> Tensor:
        keys_GSD, values_GSD = self.pool.span(layer, b, 0, stop)
        if len(q_THD) > OBSERVED:
            return attend_causal(q_THD, keys_GSD, values_GSD)
        mixed_THD, mass_GS = attend(q_THD, keys_GSD, values_GSD, self.observes)
        self.sights[b].queries[layer], self.sights[b].mass[layer] = q_THD, mass_GS
        return mixed_THD

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
        return Full(self.pool, self.sights, range(self.rows[b], self.rows[b] + 1), self.observes)

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row, whose pages are reserved, see what another row has seen."""
        length = int(self.pool.lengths_B[source])
        slots_N = self.pool.slots(row, 0, length)
        for layer in range(self.pool.config.layers):
            keys_GSD, values_GSD = self.pool.span(layer, source, 0, length)
            self.pool.write(layer, slots_N, keys_GSD.transpose(0, 1), values_GSD.transpose(0, 1))
        self.pool.lengths_B[row] = length
        self.sights[row] = self.sights[source]
