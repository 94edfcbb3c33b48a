"""What the views of one page pool share: a pass over ragged rows, and what the exact view saw in it.

Shape suffixes: B rows, T tokens fed in one pass, N = B * T, H query heads, G KV heads, U units, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from triforce.cache.pool import Pool
from triforce.shapes import columns


@dataclass(frozen=True, slots=True)
class Pass:
    """Where the tokens of one pass lie: per row on the host, as padded tensors on the device."""

    starts: list[int]
    counts: list[int]
    rotation: tuple[Tensor, Tensor]
    slots_N: Tensor

    @staticmethod
    def over(pool: Pool, rows: range, lengths_B: Tensor, counts_B: Tensor, width: int) -> Pass:
        starts, counts = lengths_B.tolist(), counts_B.tolist()  # page lists are made on the host
        slots_BT = torch.zeros(len(rows), width, dtype=torch.long, device=pool.device)  # padding: scratch page 0
        for i, b in enumerate(rows):
            slots_BT[i, : counts[i]] = pool.slots(b, starts[i], starts[i] + counts[i])
        rotation = pool.config.rope.cos_sin(columns(lengths_B, width).flatten())
        return Pass(starts, counts, rotation, slots_BT.flatten())

    def write(self, pool: Pool, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        """Rotate, remember k and v, and give back the rotated q."""
        q_NHD, k_NGD, v_NGD = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
        q_NHD, _ = pool.memory.write(layer, q_NHD, k_NGD, v_NGD, self.rotation, self.slots_N)
        return q_NHD.view(q_BTHD.shape)


@dataclass(slots=True)
class Sight:
    """What a row's last pass through the exact view saw, per layer: rotated queries (T, H, D), mass (G, U).

    `grain`: tokens of a unit of mass.
    """

    start: int = 0
    passes: int = 0
    grain: int = 0
    queries: dict[int, Tensor] = field(default_factory=dict)
    mass: dict[int, Tensor] = field(default_factory=dict)

    def query(self, layer: int, position: int) -> Tensor:
        """The query of the token at `position`, (H, D); the nearest one of the pass where it was not fed in it."""
        queries_THD = self.queries[layer]
        return queries_THD[min(max(position - self.start, 0), len(queries_THD) - 1)]
