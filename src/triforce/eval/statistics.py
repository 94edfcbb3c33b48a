"""Means with confidence intervals over neighbouring tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

NORMAL = 1.959963984540054  # 97.5 % of a normal variable lie below
ONE_SIDED = 1.6448536269514722  # 95 % do


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    blocks: int
    neighbours: float
    """Correlation of neighbouring blocks: near zero if the blocks are long enough to count as independent."""


def interval(values_N: Tensor, block: int) -> Interval:
    """Return Student's 95 % interval over the means of blocks of `block` tokens, at least two of them."""
    means_M = values_N[: len(values_N) // block * block].view(-1, block).double().mean(1)
    count = len(means_M)
    mean, half = means_M.mean().item(), student(count - 1) * means_M.std().item() / sqrt(count)
    off_M = means_M - mean
    neighbours = (off_M[1:] * off_M[:-1]).sum() / off_M.square().sum().clamp_min(1e-30)
    return Interval(mean, mean - half, mean + half, count, neighbours.item())


def student(freedom: int, z: float = NORMAL) -> float:
    """Return the point of Student's t that is `z` of a normal variable, usually that of 97.5 %.

    By the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    v = float(freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / 4 / v + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2 + third / v**3
