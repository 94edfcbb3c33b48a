"""Rows of KV in the memory of the Triton kernels, as numbers: loaded and stored here, whatever they are kept as.

A head's memory is numbers (S, D), or pages of int8 KV: the codes of 16 slots, (16, D), and then their scales.
Codes are multiplied with as they are, and their scales with what that gives, or with weights: nothing is rounded that
would not be without them. Shape suffixes as in kernel_api.py; M rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.kv_pages import is_coded, scales_of
from triforce.backends.kernel_api import PAGE, KeysValues

LANES = tl.constexpr(PAGE)


def with_scales(kv: KeysValues) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Return keys, values, where kernels find the scales of both, and whether there are any."""
    keys, values = kv
    return (keys, values, scales_of(keys), scales_of(values), True) if is_coded(keys) else (keys, values, *kv, False)


@triton.jit
def load_rows(memory, head, slot, d, there, D: tl.constexpr, CODED: tl.constexpr, FACTOR: tl.constexpr):
    """Dimensions `d` of slots, zeros of those that are not there; slots and dimensions go along two directions.

    Of codes these, as numbers of the type that matrices meet in, which has all of them.
    """
    x = tl.load(memory + _row(head, slot, D, CODED) + d, mask=there & (d < D), other=0)
    return x.to(FACTOR) if CODED else x


@triton.jit
def load_scales(scales, head, slot_K, there_K, D: tl.constexpr):
    """Scales of slots, float32: for a score, or for a weight before it meets the values."""
    return tl.load(scales + _scale(head, slot_K, D), mask=there_K, other=0.0).to(tl.float32)


@triton.jit
def weighed(
    shares_RK, v_KD, scales, head, slot_K, there_K, D: tl.constexpr, CODED: tl.constexpr, FACTOR: tl.constexpr
):  # fmt: skip
    """Weights and values as they meet. Scales of codes go to weights; in float16 to values, or small weights vanish."""
    if CODED:
        scale_K = load_scales(scales, head, slot_K, there_K, D)
        if tl.float16 == FACTOR:
            v_KD = (v_KD * scale_K[:, None]).to(FACTOR)
        else:
            shares_RK = shares_RK * scale_K[None, :]
    return shares_RK.to(v_KD.dtype).to(FACTOR), v_KD.to(FACTOR)


@triton.jit
def store_rows(memory, scales, head_M, slot_M, d_1D, x_MD, real_M, D: tl.constexpr, CODED: tl.constexpr):
    """Store rows, float32, of which what lies beyond D is zero. Codes are those of `rounded`."""
    at_MD, real_MD = memory + _row(head_M, slot_M, D, CODED)[:, None] + d_1D, real_M[:, None] & (d_1D < D)
    if CODED:
        scale_M = _scale_of(x_MD)
        inverse_M = tl.where(scale_M > 0, 1.0 / tl.where(scale_M > 0, scale_M, 1.0), 0.0)
        tl.store(at_MD, _codes(x_MD * inverse_M[:, None]), mask=real_MD)
        tl.store(scales + _scale(head_M, slot_M, D), scale_M.to(scales.dtype.element_ty), mask=real_M)
    else:
        tl.store(at_MD, x_MD.to(memory.dtype.element_ty), mask=real_MD)


@triton.jit
def _row(head, slot, D: tl.constexpr, CODED: tl.constexpr):
    """Place of a slot's first number."""
    if CODED:  # noqa: SIM108
        at = head + slot // LANES * (LANES * (D + 2)) + slot % LANES * D
    else:
        at = head + slot * D
    return at


@triton.jit
def _scale(head, slot, D: tl.constexpr):
    """Place of a slot's scale, in numbers of two bytes."""
    return head // 2 + slot // LANES * (LANES * (D + 2) // 2) + LANES * D // 2 + slot % LANES


@triton.jit
def _scale_of(x_MD):
    """A 127th of the largest, rounded up to bfloat16, as float32; NaN where a number is not finite."""
    exact_M = tl.max(tl.abs(x_MD), 1) / 127.0 + tl.sum(x_MD * 0.0, 1)
    upper_M = (exact_M.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.where(exact_M == exact_M, upper_M.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _codes(x_MD):
    """The nearest integers, to even; -127 of what is no number."""
    nearest_MD = (x_MD + 12582912.0) - 12582912.0  # where a float32 has no bits behind the point
    nearest_MD = tl.minimum(tl.maximum(nearest_MD, -127.0), 127.0)
    return tl.where(x_MD == x_MD, nearest_MD, -127.0).to(tl.int32).to(tl.int8)
