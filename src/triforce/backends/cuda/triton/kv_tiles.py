"""Loads and stores of KV rows in the memory of the Triton kernels, for every type of memory.

A head's memory is numbers (S, D), or pages of int8 KV: the codes of 16 slots, (16, D), and then their scales.
Products use codes directly: key codes times query codes, with scales applied to scores; value codes times weights that
include their scales. Shape suffixes as in kernel_api.py; M heads of tokens, R query rows, K keys of a block, P pairs of
keys (or single keys in odd units), W words of four codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.kv_pages import is_coded, scales_of
from triforce.backends.cuda.triton import interpreted
from triforce.backends.kernel_api import PAGE, KeysValues

LANES = tl.constexpr(PAGE)


def with_scales(kv: KeysValues) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Return keys, values, views of the scales of both, and whether the memory has codes.

    Without codes the views are keys and values themselves, and kernels do not read them.
    """
    keys, values = kv
    return (keys, values, scales_of(keys), scales_of(values), True) if is_coded(keys) else (keys, values, *kv, False)


@triton.jit
def load_rows(memory, head, slot, d, present, D: tl.constexpr, CODED: tl.constexpr):
    """Load dimensions `d` of slots, zeros where not `present`; slots and dimensions lie along different axes."""
    return tl.load(memory + _row(head, slot, D, CODED) + d, mask=present & (d < D), other=0)


@triton.jit
def load_scales(
    key_scales, value_scales, table, head, block, end, D: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Load the scales of keys and values of a block of a list, float32 (1, K), zeros from the list's end on.

    Neighbouring scales load in pairs, because compilers make no asynchronous copies of two-byte loads.
    """
    WIDTH: tl.constexpr = 2 if UNIT % 2 == 0 else 1
    key_P = block + WIDTH * tl.arange(0, KEYS // WIDTH)
    unit_P = tl.load(table + key_P // UNIT, mask=key_P < end, other=0)
    at_P = _scale(head, unit_P * UNIT + key_P % UNIT, D)
    return _scales(key_scales, at_P, key_P, end, WIDTH, KEYS), _scales(value_scales, at_P, key_P, end, WIDTH, KEYS)


@triton.jit
def _scales(scales, at_P, key_P, end, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    if WIDTH == 2:
        pair_bits_P = tl.load(scales.to(tl.pointer_type(tl.int32)) + at_P // 2, mask=key_P < end, other=0)
        first_P = (pair_bits_P << 16).to(tl.float32, bitcast=True)
        second_P = (pair_bits_P & -65536).to(tl.float32, bitcast=True)
        scale_K = tl.reshape(tl.join(first_P, tl.where(key_P + 1 < end, second_P, 0.0)), [KEYS])
    else:
        scale_K = tl.load(scales + at_P, mask=key_P < end, other=0.0).to(tl.float32)
    return scale_K[None, :]


@triton.jit
def query_codes(q_RD):
    """Return codes of queries, and the scale of each row: their product is `int8_rows.rounded_queries`."""
    scale_R = _exact_scale(q_RD)
    return _codes(q_RD * _inverse(scale_R)[:, None]), scale_R


@triton.jit
def mixed_block(
    weights_RK, memory, head, slot_K, in_list_K, D: tl.constexpr, D2: tl.constexpr, CODED: tl.constexpr,
    FACTOR: tl.constexpr, BY_PTX: tl.constexpr,
):  # fmt: skip
    """Return weights times values of a block of slots; weights include the scales of codes."""
    if CODED and BY_PTX:
        v_KD = _codes_by_ptx(memory, head, slot_K, in_list_K, D, D2)
        mixed_RD = tl.dot(weights_RK.to(FACTOR), v_KD)
    else:
        v_KD = load_rows(memory, head, slot_K[:, None], tl.arange(0, D2)[None, :], in_list_K[:, None], D, CODED)
        rounded_RK = weights_RK.to(FACTOR) if CODED else weights_RK.to(v_KD.dtype).to(FACTOR)
        mixed_RD = tl.dot(rounded_RK, v_KD.to(FACTOR), input_precision="ieee")
    return mixed_RD


@triton.jit
def _codes_by_ptx(memory, head, slot_K, in_list_K, D: tl.constexpr, D2: tl.constexpr):
    """Return codes as bfloat16 (K, D2), converted four at once; Triton would read shared memory byte by byte.

    A code's lower seven bits become the mantissa of a bfloat16 with the exponent of 128, which has the value 128 +
    bits. Then 128 is subtracted, or 256 if the code's sign bit is set.
    """
    d_1W = tl.arange(0, D2 // 4)[None, :]
    at_KW = _row(head, slot_K[:, None], D, True) // 4 + d_1W
    four_KW = tl.load(memory.to(tl.pointer_type(tl.int32)) + at_KW, mask=in_list_K[:, None] & (4 * d_1W < D), other=0)
    first_KW, second_KW, third_KW, fourth_KW = tl.inline_asm_elementwise(
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
        "=h,=h,=h,=h,r", [four_KW], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    codes_KW22 = tl.join(tl.join(first_KW, third_KW), tl.join(second_KW, fourth_KW))
    return tl.reshape(codes_KW22, [slot_K.shape[0], D2])


@triton.jit
def store_rows(memory, scales, head_M, slot_M, d_1D, x_MD, real_M, D: tl.constexpr, CODED: tl.constexpr):
    """Store float32 rows, which are zero beyond D. Codes are those of `int8_rows.rounded`."""
    at_MD = memory + _row(head_M, slot_M, D, CODED)[:, None] + d_1D
    real_MD = real_M[:, None] & (d_1D < D)
    if CODED:
        scale_M = _scale_of(x_MD)
        tl.store(at_MD, _codes(x_MD * _inverse(scale_M)[:, None]), mask=real_MD)
        tl.store(scales + _scale(head_M, slot_M, D), scale_M.to(scales.dtype.element_ty), mask=real_M)
    else:
        tl.store(at_MD, x_MD.to(memory.dtype.element_ty), mask=real_MD)


@triton.jit
def _row(head, slot, D: tl.constexpr, CODED: tl.constexpr):
    """Return the place of a slot's first number."""
    if CODED:
        at = head + (slot // LANES).to(tl.int64) * (LANES * (D + 2)) + slot % LANES * D
    else:
        at = head + slot.to(tl.int64) * D
    return at


@triton.jit
def _scale(head, slot, D: tl.constexpr):
    """Return the place of a slot's scale, in numbers of two bytes."""
    return head // 2 + (slot // LANES).to(tl.int64) * (LANES * (D + 2) // 2) + LANES * D // 2 + slot % LANES


@triton.jit
def _scale_of(x_MD):
    """Return largest magnitude / 127, rounded up to bfloat16, as float32; NaN where a number is not finite."""
    exact_M = _exact_scale(x_MD)
    upper_M = (exact_M.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    return tl.where(exact_M == exact_M, upper_M.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _exact_scale(x_MD):
    return tl.div_rn(tl.max(tl.abs(x_MD), 1), 127.0) + tl.sum(x_MD * 0.0, 1)


@triton.jit
def _inverse(scale_M):
    """Return 1 / scale rounded to nearest, as on a CPU. An approximate inverse would round ties to other codes."""
    return tl.where(scale_M > 0, tl.div_rn(1.0, tl.where(scale_M > 0, scale_M, 1.0)), 0.0)


@triton.jit
def _codes(x_MD):
    """Return the nearest integers, ties to even; -127 for NaN.

    The clamp comes before the addition, so that compilers cannot fuse it with the multiplication of `x_MD`.
    """
    bounded_MD = tl.minimum(tl.maximum(x_MD, -127.0), 127.0)
    nearest_MD = (bounded_MD + 12582912.0) - 12582912.0  # sums with 1.5 * 2^23 have no fractional bits
    return tl.where(x_MD == x_MD, nearest_MD, -127.0).to(tl.int32).to(tl.int8)


@triton.jit
def rotated_heads(x_MD, d_1D, HADAMARD_SIZE: tl.constexpr):
    """Return heads in float32, rotated in blocks of `HADAMARD_SIZE` channels, a power of two; 1: none. d: 0, 1, ..."""
    if HADAMARD_SIZE > 1:
        place_MD = tl.broadcast_to(d_1D, x_MD.shape)
        for stage in tl.static_range(HADAMARD_SIZE.bit_length() - 1):
            partner_MD = tl.gather(x_MD, place_MD ^ (1 << stage), 1)
            x_MD = tl.where((place_MD >> stage) % 2 == 1, partner_MD - x_MD, x_MD + partner_MD)
        x_MD *= HADAMARD_SIZE**-0.5
    return x_MD


PLACES_PER_PROGRAM = 32
"""Places that a program checks. Usually few places need a copy, and a program without copies ends early."""


def copy_pages(source: KeysValues, from_X: Tensor, target: KeysValues, to_X: Tensor, size: int) -> None:
    """Copy page `from_X[x]` of `source` to place `to_X[x]` of `target`; no copy where `to_X` is 0.

    Memories are contiguous from the start of each tensor on, in pages of `size` numbers. Both lists are int64.
    """
    if count := from_X.numel():
        places, at_once = (min(triton.next_power_of_2(count), 1024),) * 2 if interpreted() else (PLACES_PER_PROGRAM, 2)
        _carry[(triton.cdiv(count, places),)](
            *source, *target, from_X, to_X, count, size, triton.next_power_of_2(size), places, at_once
        )


@triton.jit
def _carry(
    keys, values, to_keys, to_values, from_, to, X, SIZE: tl.constexpr, SIZE2: tl.constexpr, PLACES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Copy some pages, a few at once; a program without pages to copy ends after one load."""
    first_place = tl.program_id(0) * PLACES
    e = tl.arange(0, SIZE2)
    place_X = first_place + tl.arange(0, PLACES)
    if tl.max(tl.load(to + place_X, mask=place_X < X, other=0), 0) == 0:
        return
    for start in range(first_place, first_place + PLACES, AT_ONCE):
        x_X = start + tl.arange(0, AT_ONCE)
        to_X = tl.load(to + x_X, mask=x_X < X, other=0)
        used_X = to_X > 0
        from_X = tl.load(from_ + x_X, mask=used_X, other=0)
        read_XE = from_X[:, None] * SIZE + e[None, :]
        write_XE = to_X[:, None] * SIZE + e[None, :]
        mask_XE = used_X[:, None] & (e < SIZE)[None, :]
        tl.store(to_keys + write_XE, tl.load(keys + read_XE, mask=mask_XE, other=0.0), mask=mask_XE)
        tl.store(to_values + write_XE, tl.load(values + read_XE, mask=mask_XE, other=0.0), mask=mask_XE)
