"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.

Shape suffixes: any leading dimensions, then H heads, D head size, F = D / 2 frequencies, R rotations of one model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 4096
"""Positions whose rotations are computed at once."""

RESERVED = 131072
"""Least positions that a table allocates: memory is not used until it is filled."""


class Rope:
    """Fixed rotation frequencies, and the factor on cos and sin by which yarn and longrope temper attention.

    `inv_freq` is float32, in radians per position: (F), or (R, F) where layers of a model differ (`LayerKind.rope`).
    Channels of frequency 0 are not rotated. `scale` is the `attention_scaling` of transformers' tables and applies to
    the first rotation only.
    """

    def __init__(self, inv_freq: Tensor, scale: float) -> None:
        self.inv_freq_RF = inv_freq if inv_freq.ndim == 2 else inv_freq[None]
        self.scale = scale
        scales_RF = torch.ones_like(self.inv_freq_RF, dtype=torch.float64)
        scales_RF[0, self.inv_freq_RF[0] > 0] = scale
        self._scales_RF = scales_RF
        self.tables_SF = torch.empty(0, self.inv_freq_RF.numel()), torch.empty(0, self.inv_freq_RF.numel())
        """`cos_sin` by position, on the CPU, filled as far as `tables` was called for."""
        self.covered = 0
        """Positions from 0 on for which the tables are filled."""
        self._blocks: set[int] = set()

    def cos_sin(self, positions: Tensor, rotation: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of one rotation at each position: float32 (..., F) each, on the device of `positions`.

        The angles are those of transformers. Their cos and sin are computed in float64, as a float32 function may round
        a value differently by its place in the tensor.
        """
        inv_freq_F, scale_F = (
            by_rotation_RF[rotation].to(positions.device) for by_rotation_RF in (self.inv_freq_RF, self._scales_RF)
        )
        angles = (positions[..., None].float() * inv_freq_F).double()
        return (angles.cos() * scale_F).float(), (angles.sin() * scale_F).float()

    def tables(self, starts: Iterable[int], count: int) -> tuple[Tensor, Tensor]:
        """Return cached tables of `cos_sin` by position, filled for `count` positions from each of `starts`.

        Two tensors (positions, R * F) on the CPU: rotation after rotation.
        """
        for start in starts:
            for block in range(start // BLOCK, (start + count - 1) // BLOCK + 1):
                if block not in self._blocks:
                    self._fill(block)
        return self.tables_SF

    def _fill(self, block: int) -> None:
        start = block * BLOCK
        end = (block + 1) * BLOCK
        if (capacity := len(self.tables_SF[0])) < end:
            larger_tables = [torch.empty(max(RESERVED, 2 * end), self.inv_freq_RF.numel()) for _ in range(2)]
            for old_table, new_table in zip(self.tables_SF, larger_tables, strict=True):
                new_table[:capacity] = old_table
            self.tables_SF = larger_tables[0], larger_tables[1]
        F = self.inv_freq_RF.shape[1]
        for rotation in range(len(self.inv_freq_RF)):
            columns = slice(rotation * F, (rotation + 1) * F)
            values = self.cos_sin(torch.arange(start, end), rotation)
            for table_SF, values_SF in zip(self.tables_SF, values, strict=True):
                table_SF[start:end, columns] = values_SF
        self._blocks.add(block)
        while self.covered // BLOCK in self._blocks:
            self.covered += BLOCK


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys (..., H, D) by their positions; computed in float32, returned in the dtype of `x`."""
    cos, sin = (table[..., None, :] for table in cos_sin)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
