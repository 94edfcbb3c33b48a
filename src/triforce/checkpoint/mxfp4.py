"""MXFP4 (OCP Microscaling Formats, 1.0): 32 inputs share a power of two, and each is one of 16 numbers.

Twice each of these is a whole number: so these are codes of Q5_0, which kernels multiply with, and none is rounded.

Shape suffixes: O outputs, B blocks of 32 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.model.weights import Matrix, QuantizedWeight

DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number of each code, E2M1."""
CENTRE = 16
"""Code of 0 in Q5_0."""


def size(weights: int) -> int:
    """Return bytes of so many weights as kernels have them: 22 of each block of 32."""
    return weights * 22 // 32


def weight(codes_OB32: Tensor, scales_OB: Tensor, *, narrow: bool) -> Matrix:
    """Return a matrix (O, 32 B) of codes and scales, uint8: narrow, as Q5_0 where that has the scales; or bfloat16."""
    packed = q5_0(codes_OB32, scales_OB) if narrow else None
    if packed is not None:
        return QuantizedWeight("Q5_0", packed, codes_OB32[0].numel())
    return numbers(codes_OB32, scales_OB)


def numbers(codes_OB32: Tensor, scales_OB: Tensor) -> Tensor:
    """Return the numbers (O, 32 B), bfloat16, which has them all; NaN where a scale stands for it."""
    exponents_OB1 = scales_OB.int()[..., None] - 128
    numbers_OB32 = torch.ldexp(_doubles(codes_OB32).float(), exponents_OB1)
    return numbers_OB32.masked_fill_(scales_OB[..., None] == 255, torch.nan).flatten(1).to(torch.bfloat16)


def q5_0(codes_OB32: Tensor, scales_OB: Tensor) -> Tensor | None:
    """Return the same numbers as rows of Q5_0, uint8 (O, 22 B); None where a scale is no float16.

    A block has its scale, the fifth bits of 32 codes, and the other four: those of the first half in the lower nibbles.
    """
    whole_OB32 = _doubles(codes_OB32) + CENTRE
    scales_OB = scales_OB.masked_fill((whole_OB32 == CENTRE).all(-1), 128)  # zeros, whatever their scale
    scales_OB1 = torch.ldexp(torch.ones(scales_OB.shape), scales_OB.int() - 128)[..., None].half()
    if not torch.equal(scales_OB1[..., 0].float().log2(), scales_OB.float() - 128):
        return None
    nibbles_OB16 = (whole_OB32[..., :16] & 15) | (whole_OB32[..., 16:] & 15) << 4
    fifths_OB4 = ((whole_OB32 >> 4).view(*scales_OB.shape, 4, 8) << torch.arange(8)).sum(-1)
    parts = scales_OB1.view(torch.uint8), fifths_OB4.to(torch.uint8), nibbles_OB16.to(torch.uint8)
    return torch.cat(parts, -1).flatten(1)


def _doubles(codes_OB32: Tensor) -> Tensor:
    return torch.tensor(DOUBLES, dtype=torch.int32)[codes_OB32.long()]
