"""Rows of int8 KV as a tier reads them that looks at the upper nibbles alone."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 8
"""Half a step of what upper nibbles count."""


def from_upper(rows_R: Tensor, added: int = HALF) -> Tensor:
    """Rows whose codes have lost their lower nibbles, and got so much in their place."""
    codes = rows_R[..., :-2]
    return torch.cat([(codes >> 4 << 4) + added, rows_R[..., -2:]], -1)
