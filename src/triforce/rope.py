"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.

Shape suffixes: any leading dimensions, then H heads, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 4096
"""Positions that a table grows by at least."""


class Rope:
    """Fixed rotation frequencies, and the factor on cos and sin by which yarn and longrope temper attention.

    `inv_freq_F` is float32, in radians per position; `scale` is the `attention_scaling` of transformers' tables.
    """

    def __init__(self, inv_freq_F: Tensor, scale: float) -> None:
        self.inv_freq_F = inv_freq_F
        self.scale = scale
        nothing_SF = torch.empty(0, len(inv_freq_F))
        self._tables_SF = (nothing_SF, nothing_SF)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation at each position: two float32 tensors (..., F), on the device of the positions.

        The angles are those of transformers. Their cos and sin are taken in float64, as a float32 function may round
        a value differently by where it stands in the tensor.
        """
        angles = (positions[..., None].float() * self.inv_freq_F.to(positions.device)).double()
        return (angles.cos() * self.scale).float(), (angles.sin() * self.scale).float()

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """`cos_sin` of positions [0, S), where S is at least `length`; on the CPU, and remembered."""
        known = len(self._tables_SF[0])
        if known < length:
            new = self.cos_sin(torch.arange(known, -(-length // STEP) * STEP))
            cos_SF, sin_SF = (torch.cat([old, more.cpu()]) for old, more in zip(self._tables_SF, new, strict=True))
            self._tables_SF = cos_SF, sin_SF
        return self._tables_SF


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys (..., H, D) turned to their positions; computed in float32, returned in the dtype of `x`."""
    cos, sin = (table[..., None, :] for table in cos_sin)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
