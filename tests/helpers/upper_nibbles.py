"""Rows of int8 KV as read by a tier that reads upper nibbles only."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 8
"""Half a step of the upper nibbles."""


def from_upper(rows_R: Tensor, added: int = HALF) -> Tensor:
    """Return rows whose codes have `added` in place of their lower nibbles."""
    codes = rows_R[..., :-2]
    return torch.cat([(codes >> 4 << 4) + added, rows_R[..., -2:]], -1)
