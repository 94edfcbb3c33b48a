"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.

Shape suffixes: any leading dimensions, then F = D / 2 frequencies of a head of size D, R rotations of one model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Positions whose rotations are computed at once."""

RESERVED = 131072
"""Least number of positions that a table allocates. Its pages take no memory until positions are filled."""


class Rope:
    """Fixed rotation frequencies, and the factor on cos and sin by which yarn and longrope temper attention.

    `inv_freq` is float32, in radians per position: (F), or (R, F) where layers of a model differ (`LayerKind.rope`).
    Channels of frequency 0 are not rotated. `scale` is the `attention_scaling` of transformers' tables and applies to
    the first rotation only.
    """

    def __init__(self, inv_freq: NDArray[np.float32], scale: float) -> None:
        self.inv_freq_RF = inv_freq if inv_freq.ndim == 2 else inv_freq[None]
        self.scale = scale
        self.scales_RF = np.ones(self.inv_freq_RF.shape)
        """Factor on cos and sin of each channel, float64."""
        self.scales_RF[0, self.inv_freq_RF[0] > 0] = scale
        empty_SF = np.empty((0, self.inv_freq_RF.size), np.float32)
        self.tables_SF = empty_SF, empty_SF
        """`cos_sin` by position. `tables` fills the positions that it is called with."""
        self.covered = 0
        """Positions from 0 on for which the tables are filled."""
        self._blocks: set[int] = set()

    def cos_sin(self, positions: NDArray[Any], rotation: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cos and sin of one rotation at each position: float32 (..., F) each.

        The angles are those of transformers. Their cos and sin are computed in float64, because a float32 function may
        round a value differently by its place in the array.
        """
        angles = (positions[..., None].astype(np.float32) * self.inv_freq_RF[rotation]).astype(np.float64)
        scale_F = self.scales_RF[rotation]
        return (np.cos(angles) * scale_F).astype(np.float32), (np.sin(angles) * scale_F).astype(np.float32)

    def tables(self, starts: Iterable[int], count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cached tables of `cos_sin` by position, filled for `count` positions from each of `starts`.

        Two arrays (positions, R * F): rotation after rotation.
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
            larger_shape = max(RESERVED, 2 * end), self.inv_freq_RF.size
            larger_tables = [np.empty(larger_shape, np.float32) for _ in range(2)]
            for old_table, new_table in zip(self.tables_SF, larger_tables, strict=True):
                new_table[:capacity] = old_table
            self.tables_SF = larger_tables[0], larger_tables[1]
        F = self.inv_freq_RF.shape[1]
        for rotation in range(len(self.inv_freq_RF)):
            columns = slice(rotation * F, (rotation + 1) * F)
            values = self.cos_sin(np.arange(start, end), rotation)
            for table_SF, values_SF in zip(self.tables_SF, values, strict=True):
                table_SF[start:end, columns] = values_SF
        self._blocks.add(block)
        while self.covered // BLOCK in self._blocks:
            self.covered += BLOCK
