"""Products with packed weights, whose codes become numbers in registers, and rows of such weights as numbers.

`_load` loads a tile of a weight for both. A program has 32 outputs and a part of the inputs: with all inputs, matrices
of few outputs would leave a device idle. The sums of the parts are added in order. A program has up to 16 tokens, or up
to 32 if the product has more than 16 tokens. A token's bits depend on this height; passes of `strict` mode have one
shape, and thus one height.

Shape suffixes: N tokens, M outputs, K inputs, X inputs of half of an eight of groups (see `packed_weight`), P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.packed_weight import EIGHT, OUTPUTS, PackedWeight
from triforce.backends.cuda.triton import TRITON_TYPES, interpreted, multiplied_as

LOW_TILE = 16
HIGH_TILE = 32
"""Tokens of a program: of products of at most `LOW_TILE` tokens, and of products of more tokens."""
MAX_TOKENS = 256
"""Most tokens of these kernels. More tokens are prefill: a matrix becomes numbers, which torch multiplies with."""
PROGRAMS = 512
"""Programs of a matrix for one block of tokens, if its inputs suffice: four for each multiprocessor of an H100."""
TILE = tl.constexpr(OUTPUTS)
GROUPS = tl.constexpr(EIGHT)
HALF = tl.constexpr(16)


def times(x_NK: Tensor, weight: PackedWeight, bias_M: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, (N, M), in the type of x; sums are float32."""
    N, K = x_NK.shape
    M = weight.outputs
    if N > MAX_TOKENS:
        all_ids_M = torch.arange(M, device=x_NK.device)
        bias_M = None if bias_M is None else bias_M.to(x_NK.dtype)
        return torch.nn.functional.linear(x_NK, rows_of(weight, all_ids_M, x_NK.dtype), bias_M)
    y_NM = torch.empty(N, M, dtype=x_NK.dtype, device=x_NK.device)
    x_NK = x_NK.contiguous()
    height, warps, stages = (LOW_TILE, 4, 3) if N <= LOW_TILE else (HIGH_TILE, 8, 2)
    tiles = triton.cdiv(M, OUTPUTS)
    eights = weight.blocks.shape[1]
    eights_per_part = triton.cdiv(eights, triton.cdiv(PROGRAMS, tiles))
    P = triton.cdiv(eights, eights_per_part)
    sums_PNM = y_NM.new_empty(P, N, M, dtype=torch.float32) if P > 1 else y_NM
    bias = (x_NK if bias_M is None else bias_M), bias_M is not None
    if N:
        _times[(tiles, triton.cdiv(N, height), P)](
            x_NK, bias[0], sums_PNM, *_planes(weight), N, M, K, eights_per_part, *_parts(weight), bias[1] and P == 1,
            height, multiplied_as(x_NK), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if N and P > 1:
        outputs_at_once = 1024
        _add_parts[(triton.cdiv(M, outputs_at_once), N)](sums_PNM, bias[0], y_NM, N, M, P, bias[1], outputs_at_once)
    return y_NM


def rows_of(weight: PackedWeight, ids_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a matrix as numbers (N, K) of type `dtype`."""
    N = len(ids_N)
    K = weight.inputs
    rows_at_once = 256 if interpreted() else 16
    number_type = torch.float32 if interpreted() else dtype  # the interpreter truncates to bfloat16
    rows_NK = torch.empty(N, K, dtype=number_type, device=ids_N.device)
    if N:
        _rows[(weight.blocks.shape[1], triton.cdiv(N, rows_at_once))](
            ids_N, rows_NK, *_planes(weight), N, K, *_parts(weight), rows_at_once, TRITON_TYPES[str(number_type)]
        )  # fmt: skip
    return rows_NK.to(dtype)


def _planes(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return weight.blocks, weight.scales, weight.minima, weight.small_scales


def _parts(weight: PackedWeight) -> tuple[int, int, int, int, bool, bool, bool]:
    """Return eights of a row, the count of small scales of one kind, and `_load`'s settings of a type."""
    bits, offset, scales, _ = weight.format
    eights = weight.blocks.shape[1]
    kind = scales.startswith("super"), scales.endswith("min"), scales == "super_half"
    return eights, weight.small_scales.numel() // 2, bits, offset if bits == 4 else 0, *kind


@triton.jit
def _load_scales(
    scales, minima, small, m_M, eight, eights, all_small, SUPER: tl.constexpr, MINIMUM: tl.constexpr
):  # fmt: skip
    """Load scales of some outputs for one eight of groups, a step ahead of their use.

    Returns scale, minimum, and the small scales of both; the scale stands in for values that a type lacks.
    """
    row_M = (m_M.to(tl.int64) // TILE * eights + eight) * TILE + m_M % TILE
    at_MG1 = (row_M[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :])[:, :, None]
    scale_at = row_M[:, None, None] if SUPER else at_MG1
    scale = tl.load(scales + scale_at)
    minimum = tl.load(minima + scale_at) if MINIMUM else scale
    small_scale = tl.load(small + at_MG1) if SUPER else scale
    second_small = tl.load(small + all_small + at_MG1) if SUPER else scale
    return scale, minimum, small_scale, second_small


@triton.jit
def _load(
    codes, m_M, eight, eights, scale_MG1, minimum_MG1, small_scale_MG1, second_small_MG1, BITS: tl.constexpr,
    OFFSET: tl.constexpr, SUPER: tl.constexpr, MINIMUM: tl.constexpr, BY_HALF: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Return numbers of some outputs and of one eight of groups: of the groups' first halves, and second halves."""
    row_M = (m_M.to(tl.int64) // TILE * eights + eight) * TILE + m_M % TILE
    at_MG1 = (row_M[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :])[:, :, None]
    i = tl.arange(0, HALF)[None, None, :]
    if BITS == 4:
        both_MGX = tl.load(codes + at_MG1 * HALF + i).to(tl.int32)
        first_MGX = ((both_MGX & 15) - OFFSET).to(tl.float32)
        second_MGX = ((both_MGX >> 4) - OFFSET).to(tl.float32)
    else:
        first_MGX = tl.load(codes + at_MG1 * (2 * HALF) + i).to(tl.int8, bitcast=True).to(tl.float32)
        second_MGX = tl.load(codes + at_MG1 * (2 * HALF) + HALF + i).to(tl.int8, bitcast=True).to(tl.float32)
    scale_MG1 = scale_MG1.to(tl.float32)
    minimum_MG1 = minimum_MG1.to(tl.float32)
    half_MG1 = scale_MG1
    if SUPER:
        small_scale_MG1 = small_scale_MG1.to(tl.float32)
        second_small_MG1 = second_small_MG1.to(tl.float32)
        minimum_MG1 = -minimum_MG1 * second_small_MG1
        half_MG1 = scale_MG1 * second_small_MG1
        scale_MG1 = scale_MG1 * small_scale_MG1
    first_MGX *= scale_MG1
    second_MGX *= half_MG1 if BY_HALF else scale_MG1
    if MINIMUM:
        first_MGX += minimum_MG1
        second_MGX += minimum_MG1
    M: tl.constexpr = m_M.shape[0]
    return (
        tl.reshape(first_MGX.to(NUMBER), [M, GROUPS * HALF]), tl.reshape(second_MGX.to(NUMBER), [M, GROUPS * HALF])
    )  # fmt: skip


@triton.jit
def _inputs(eight):
    """Return the inputs in the first halves of an eight's groups."""
    x = tl.arange(0, GROUPS * HALF)
    return (eight * GROUPS + x // HALF) * (2 * HALF) + x % HALF


@triton.jit
def _times(
    x, bias, y, codes, scales, minima, small, N, M, K, eights_per_part, eights, all_small, BITS: tl.constexpr,
    OFFSET: tl.constexpr, SUPER: tl.constexpr, MINIMUM: tl.constexpr, BY_HALF: tl.constexpr, BIASED: tl.constexpr,
    HEIGHT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Multiply some tokens with a tile's outputs, over `eights_per_part` eights of inputs; scales load a step ahead."""
    m_M = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n_N = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    y_NM = tl.full([HEIGHT, TILE], 0.0, tl.float32)
    start = tl.program_id(2) * eights_per_part
    stop = min(start + eights_per_part, eights)
    scale, minimum, small_scale, second_small = _load_scales(
        scales, minima, small, m_M, start, eights, all_small, SUPER, MINIMUM
    )  # fmt: skip
    for eight in range(start, stop):
        next_eight = min(eight + 1, stop - 1)
        scale_next, minimum_next, small_scale_next, second_small_next = _load_scales(
            scales, minima, small, m_M, next_eight, eights, all_small, SUPER, MINIMUM
        )  # fmt: skip
        first_MX, second_MX = _load(
            codes, m_M, eight, eights, scale, minimum, small_scale, second_small, BITS, OFFSET, SUPER, MINIMUM, BY_HALF,
            FACTOR,
        )  # fmt: skip
        scale = scale_next
        minimum = minimum_next
        small_scale = small_scale_next
        second_small = second_small_next
        k_X = _inputs(eight)
        at_NX = x + n_N.to(tl.int64)[:, None] * K + k_X[None, :]
        real_N1 = (n_N < N)[:, None]
        x_NX = tl.load(at_NX, mask=real_N1 & (k_X < K)[None, :], other=0.0).to(FACTOR)
        y_NM = tl.dot(x_NX, tl.trans(first_MX), y_NM, input_precision="ieee")
        x_NX = tl.load(at_NX + HALF, mask=real_N1 & (k_X + HALF < K)[None, :], other=0.0).to(FACTOR)
        y_NM = tl.dot(x_NX, tl.trans(second_MX), y_NM, input_precision="ieee")
    if BIASED:
        y_NM += tl.load(bias + m_M, mask=m_M < M, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + (tl.program_id(2).to(tl.int64) * N + n_N)[:, None] * M + m_M[None, :], y_NM.to(y.dtype.element_ty),
        mask=(n_N < N)[:, None] & (m_M < M)[None, :],
    )  # fmt: skip


@triton.jit
def _add_parts(sums, bias, y, N, M, P, BIASED: tl.constexpr, OUTPUTS_AT_ONCE: tl.constexpr):
    """Add the sums of all parts of some outputs of one token, in order."""
    m_M = tl.program_id(0) * OUTPUTS_AT_ONCE + tl.arange(0, OUTPUTS_AT_ONCE)
    n = tl.program_id(1).to(tl.int64)
    y_M = tl.full([OUTPUTS_AT_ONCE], 0.0, tl.float32)
    for p in range(P):
        y_M += tl.load(sums + (p * N + n) * M + m_M, mask=m_M < M, other=0.0)
    if BIASED:
        y_M += tl.load(bias + m_M, mask=m_M < M, other=0.0).to(tl.float32)
    tl.store(y + n * M + m_M, y_M.to(y.dtype.element_ty), mask=m_M < M)


@triton.jit
def _rows(
    ids, out, codes, scales, minima, small, N, K, eights, all_small, BITS: tl.constexpr, OFFSET: tl.constexpr,
    SUPER: tl.constexpr, MINIMUM: tl.constexpr, BY_HALF: tl.constexpr, ROWS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Store numbers of some rows of one eight of groups."""
    eight = tl.program_id(0)
    n_N = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_N = tl.load(ids + n_N, mask=n_N < N, other=0)
    scale, minimum, small_scale, second_small = _load_scales(
        scales, minima, small, m_N, eight, eights, all_small, SUPER, MINIMUM
    )  # fmt: skip
    first_NX, second_NX = _load(
        codes, m_N, eight, eights, scale, minimum, small_scale, second_small, BITS, OFFSET, SUPER, MINIMUM, BY_HALF,
        NUMBER,
    )  # fmt: skip
    k_X = _inputs(eight)
    at_NX = out + n_N.to(tl.int64)[:, None] * K + k_X[None, :]
    tl.store(at_NX, first_NX, mask=(n_N < N)[:, None] & (k_X < K)[None, :])
    tl.store(at_NX + HALF, second_NX, mask=(n_N < N)[:, None] & (k_X + HALF < K)[None, :])
