"""Rotation of queries and keys by their positions, on tensors (see `triforce.model.rope`).

Shape suffixes: any leading dimensions, then H heads, D head size, F = D / 2 frequencies, R rotations of one model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.backends.torch.tensors import tensor_of
from triforce.model.rope import Rope


class RopeTensors:
    """Frequencies and factors of a `Rope` on a device."""

    def __init__(self, rope: Rope, device: torch.device | str) -> None:
        self._inv_freq_RF = tensor_of(rope.inv_freq_RF, device)
        self._scales_RF = tensor_of(rope.scales_RF, device)

    def cos_sin(self, positions: Tensor, rotation: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin as `Rope.cos_sin` does, from positions on the device."""
        angles = (positions[..., None].float() * self._inv_freq_RF[rotation]).double()
        scale_F = self._scales_RF[rotation]
        return (angles.cos() * scale_F).float(), (angles.sin() * scale_F).float()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys (..., H, D) by their positions; computed in float32, returned in the dtype of `x`."""
    cos, sin = (table[..., None, :] for table in cos_sin)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
