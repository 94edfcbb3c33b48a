"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints.

Shape suffixes: B rows, T tokens, H heads, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """Fixed rotation frequencies, and the factor on cos and sin by which yarn and longrope temper attention.

    `inv_freq_F` is float32, in radians per position; `scale` is the `attention_scaling` of transformers' tables.
    """

    def __init__(self, inv_freq_F: Tensor, scale: float) -> None:
        self.inv_freq_F = inv_freq_F
        self.scale = scale

    def cos_sin(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation at each position: two float32 tensors (B, T, D), on the device of the positions."""
        angles_BTF = positions_BT[..., None].float() * self.inv_freq_F.to(positions_BT.device)
        angles_BTD = torch.cat((angles_BTF, angles_BTF), dim=-1)
        return angles_BTD.cos() * self.scale, angles_BTD.sin() * self.scale


def rotate(x_BTHD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys turned to their positions; computed in float32, returned in the dtype of `x_BTHD`."""
    F = x_BTHD.shape[-1] // 2
    cos_BT1F, sin_BT1F = (table_BTD[..., None, :F] for table_BTD in cos_sin)
    a_BTHF, b_BTHF = x_BTHD.float().chunk(2, dim=-1)
    turned = (a_BTHF * cos_BT1F - b_BTHF * sin_BT1F, b_BTHF * cos_BT1F + a_BTHF * sin_BT1F)
    return torch.cat(turned, dim=-1).to(x_BTHD.dtype)
