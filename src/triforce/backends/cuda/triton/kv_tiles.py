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
def load_rows(memory, head, slot, d, there, D: tl.constexpr, CODED: tl.constexpr):
    """Dimensions `d` of slots, zeros of those that are not there; slots and dimensions go along two directions."""
    return tl.load(memory + _row(head, slot, D, CODED) + d, mask=there & (d < D), other=0)


@triton.jit
def load_scales(scales, head, slot_K, there_K, D: tl.constexpr):
    """Scales of slots, float32: for a score, or for a weight before it meets the values."""
    return tl.load(scales + _scale(head, slot_K, D), mask=there_K, other=0.0).to(tl.float32)


@triton.jit
def rounded_queries(q_RD):
    """Queries as they meet codes, which are integers times a number of each row: as `kv_rows.rounded_queries`."""
    scale_R = tl.max(tl.abs(q_RD), 1) / 127.0 + tl.sum(q_RD * 0.0, 1)
    inverse_R = tl.where(scale_R > 0, 1.0 / tl.where(scale_R > 0, scale_R, 1.0), 0.0)
    return _codes(q_RD * inverse_R[:, None]), scale_R


@triton.jit
def mixed_block(
    shares_RK, memory, scales, head, slot_K, there_K, D: tl.constexpr, D2: tl.constexpr, CODED: tl.constexpr,
    FACTOR: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Values of a block of slots, times their weights. The scales of codes go to weights: a code has all of its bits."""
    if CODED:
        shares_RK *= load_scales(scales, head, slot_K, there_K, D)[None, :]
    if CODED and BY_PTX:
        v_KD = _codes_by_ptx(memory, head, slot_K, there_K, D, D2)
        mixed_RD = tl.dot(shares_RK.to(FACTOR), v_KD)
    else:
        v_KD = load_rows(memory, head, slot_K[:, None], tl.arange(0, D2)[None, :], there_K[:, None], D, CODED)
        rounded_RK = shares_RK.to(FACTOR) if CODED else shares_RK.to(v_KD.dtype).to(FACTOR)
        mixed_RD = tl.dot(rounded_RK, v_KD.to(FACTOR), input_precision="ieee")
    return mixed_RD


@triton.jit
def _codes_by_ptx(memory, head, slot_K, there_K, D: tl.constexpr, D2: tl.constexpr):
    """Codes as bfloat16, four at once: seven bits behind a 128, of which 128 is taken, or 256 where the eighth is set."""
    d_1F = tl.arange(0, D2 // 4)[None, :]
    at_KF = _row(head, slot_K[:, None], D, True) // 4 + d_1F
    four_KF = tl.load(memory.to(tl.pointer_type(tl.int32)) + at_KF, mask=there_K[:, None] & (4 * d_1F < D), other=0)
    first_KF, second_KF, third_KF, fourth_KF = tl.inline_asm_elementwise(
        """{
        .reg .b32 seven, eighth, one, low, high, less, much;
        and.b32 seven, $4, 0x7F7F7F7F;
        and.b32 eighth, $4, 0x80808080;
        prmt.b32 low, seven, 0x43434343, 0x4140;
        prmt.b32 high, seven, 0x43434343, 0x4342;
        prmt.b32 less, eighth, 0xC3C3C3C3, 0x4140;
        prmt.b32 much, eighth, 0xC3C3C3C3, 0x4342;
        mov.b32 one, 0x3F803F80;
        fma.rn.bf16x2 low, low, one, less;
        fma.rn.bf16x2 high, high, one, much;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
        }""",
        "=h,=h,=h,=h,r", [four_KF], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    pairs_KF22 = tl.join(tl.join(first_KF, third_KF), tl.join(second_KF, fourth_KF))
    return tl.reshape(pairs_KF22, [slot_K.shape[0], D2])


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
        at = head + (slot // LANES).to(tl.int64) * (LANES * (D + 2)) + slot % LANES * D
    else:
        at = head + slot.to(tl.int64) * D
    return at


@triton.jit
def _scale(head, slot, D: tl.constexpr):
    """Place of a slot's scale, in numbers of two bytes."""
    return head // 2 + (slot // LANES).to(tl.int64) * (LANES * (D + 2) // 2) + LANES * D // 2 + slot % LANES


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
