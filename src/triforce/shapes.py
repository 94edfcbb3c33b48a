"""Index arithmetic that every ragged batch needs. B rows."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def columns(start_B: Tensor, width: int) -> Tensor:
    """(B, width): start_B, start_B + 1, ..."""
    return start_B[:, None] + _counting(width, start_B.device)


def longs(values: list[int]) -> Tensor:
    """Integers for the host."""
    return torch.tensor(values, dtype=torch.long)


@cache
def _counting(width: int, device: torch.device) -> Tensor:
    """0, 1, ...: asked for many times in each round, and never written to."""
    return torch.arange(width, device=device)
