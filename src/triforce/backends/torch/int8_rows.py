"""Rows of int8 KV in torch (see `triforce.model.kv_rows`): the reference of the native kernels, bit for bit.

Shape suffix: R, D + 2.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from triforce.model.config import SCALE_BYTES
from triforce.model.kv_rows import LARGEST_CODE, hadamard_block


def rounded(x_D: Tensor) -> Tensor:
    """Round numbers (..., D) to the nearest multiples of a scale: int8 (..., R), bit for bit as native kernels do.

    The scale is rounded up, so that no code is above the largest. If a number is not finite, the scale is NaN.
    """
    if not x_D.numel():
        return x_D.new_empty(*x_D.shape[:-1], x_D.shape[-1] + SCALE_BYTES, dtype=torch.int8)
    x_D = x_D.float()
    exact = x_D.abs().amax(-1, keepdim=True) / LARGEST_CODE + (x_D * 0).sum(-1, keepdim=True)
    upper = torch.where(exact.isnan(), 0x7FC0, (exact.view(torch.int32) + 0xFFFF) >> 16)
    scale = upper.to(torch.int16).view(torch.bfloat16)
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes_D = (x_D * inverse).nan_to_num(-LARGEST_CODE).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return torch.cat([codes_D, scale.view(torch.int8)], -1)


def rounded_queries(q_D: Tensor) -> Tensor:
    """Round queries (..., D), as products with int8 keys use them, to multiples of largest magnitude / 127: float32."""
    q_D = q_D.float()
    scale = q_D.abs().amax(-1, keepdim=True) / LARGEST_CODE
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (q_D * inverse).clamp(-LARGEST_CODE, LARGEST_CODE).round() * scale


def rotated_head(x_D: Tensor) -> Tensor:
    """Rotate heads (..., D) by Hadamard matrices in blocks of the largest power of two that divides D: float32.

    No channel is then much larger than the others (QuaRot, Ashkboos et al. 2024), products of queries and keys stay the
    same, and the same rotation rotates mixed values back. The bits are those of the native kernels.
    """
    x_D = x_D.float()
    size = hadamard_block(x_D.shape[-1])
    for distance in (2**n for n in range(size.bit_length() - 1)):
        a, b = x_D.reshape(*x_D.shape[:-1], x_D.shape[-1] // (2 * distance), 2, distance).unbind(-2)
        x_D = torch.stack([a + b, a - b], -2).flatten(-3)
    return x_D * (1 / sqrt(size))


def numbers(rows_R: Tensor) -> Tensor:
    """Return the numbers (..., D) of int8 rows, float32 and exact; rows of other types are returned as they are."""
    if rows_R.dtype != torch.int8:
        return rows_R
    scale = rows_R[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return rows_R[..., :-SCALE_BYTES].float() * scale.float()
