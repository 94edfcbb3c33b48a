"""Index arithmetic that every ragged batch needs. B rows."""

from __future__ import annotations

import torch
from torch import Tensor


def columns(start_B: Tensor, width: int) -> Tensor:
    """(B, width): start_B, start_B + 1, ..."""
    return start_B[:, None] + torch.arange(width, device=start_B.device)


def longs(values: list[int]) -> Tensor:
    """Integers for the host."""
    return torch.tensor(values, dtype=torch.long)
