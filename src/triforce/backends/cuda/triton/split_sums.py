"""Sums of splits of attention, merged in a fixed order, and the mass of units once the whole is known.

Shape suffixes as in attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.triton import interpreted
from triforce.backends.cuda.triton.rotation import rotated_heads

FEW = 16
"""Query rows of a KV head at most that have several programs each. It was tried at 4, which want them, and at 32."""


def merge(
    parts: tuple[Tensor, Tensor, Tensor],
    spans: tuple[Tensor, Tensor],
    attn_out_BTHD: Tensor,
    whole_BGR: Tensor,
    split: int,
    together: int,
) -> None:
    """Write the mixed values, and the log-sum-exp of each query row in base 2.

    parts: sums (B, G, N, R, D), peaks and totals (B, G, N, R) of splits of so many keys. spans: starts and counts (B).
    Few query rows have several programs each, as one after another leaves a device idle (docs/gpu.md). Of values in
    rotated heads a program has them all, and rotates so many channels back together; 1: none.
    """
    (B, G, N, R, D), (T, H) = parts[0].shape, attn_out_BTHD.shape[1:3]
    some, rows = (8, 16) if interpreted() else (32, 1)  # an interpreted program takes milliseconds, whatever it does
    whole = max(16, triton.next_power_of_2(D))
    dims = min(32, whole) if R <= FEW and together == 1 else whole
    _merge[(triton.cdiv(R, rows), G * triton.cdiv(D, dims), B)](
        *parts, *spans, attn_out_BTHD, whole_BGR, G, T, R, N, split, H // G, D, dims, some, rows, together
    )


def weigh(
    units_BGRU: Tensor, whole_BGR: Tensor, spans: tuple[Tensor, Tensor], mass_BGU: Tensor, group: int, unit: int
) -> None:
    """Write the mass of each unit, of log-sum-exps of its keys and of the whole row."""
    B, G, R, U = units_BGRU.shape
    _weigh[(triton.cdiv(U, 64), G, B)](units_BGRU, whole_BGR, *spans, mass_BGU, G, R, U, group, unit, 16, 64)


@triton.jit
def _merge(
    parts, peaks, sums, starts, counts, mixed, whole, G, T, R, N, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DIMS: tl.constexpr, SOME: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The splits of some query rows and dimensions, in ascending order; zeros where there are fewer queries."""
    row_R, g, b = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) % G, tl.program_id(2)
    start, count = tl.load(starts + b).to(tl.int32), tl.load(counts + b).to(tl.int32)
    dims = tl.program_id(1) // G
    d, token_R, real_R = dims * DIMS + tl.arange(0, DIMS), row_R // GROUP, row_R < count * GROUP
    used = tl.where(tl.program_id(0) * ROWS < count * GROUP, (start + count + SPLIT - 1) // SPLIT, 0)
    peak_R, total_R = tl.full([ROWS], -float("inf"), tl.float32), tl.full([ROWS], 0.0, tl.float32)
    head = (b * G + g).to(tl.int64) * N
    attn_out_RD = tl.full([ROWS, DIMS], 0.0, tl.float32)
    for first in tl.range(0, used, SOME, num_stages=3):
        split_N = first + tl.arange(0, SOME)
        at_NR = (head + split_N)[:, None] * R + row_R[None, :]
        there_NR = (split_N < used)[:, None] & real_R[None, :]
        peak_NR = tl.load(peaks + at_NR, mask=there_NR, other=-float("inf"))
        higher_R = tl.maximum(peak_R, tl.max(peak_NR, 0))
        base_R = tl.where(higher_R == -float("inf"), 0.0, higher_R)
        fade_R = tl.exp2(peak_R - base_R)
        attn_out_RD, total_R, peak_R = attn_out_RD * fade_R[:, None], total_R * fade_R, higher_R
        share_NR = tl.exp2(peak_NR - base_R[None, :])
        sum_NR = tl.load(sums + at_NR, mask=there_NR, other=0.0)
        mask_NRD = there_NR[:, :, None] & (d < D)[None, None, :]
        part_NRD = tl.load(parts + at_NR[:, :, None] * D + d[None, None, :], mask=mask_NRD, other=0.0)
        attn_out_RD += tl.sum(part_NRD * share_NR[:, :, None], 0)
        total_R += tl.sum(sum_NR * share_NR, 0)
    some_R = tl.where(total_R > 0, total_R, 1.0)
    cell_R = ((b * T + token_R) * G * GROUP + g * GROUP + row_R % GROUP) * D
    out_RD = rotated_heads(attn_out_RD / some_R[:, None], d[None, :], TOGETHER).to(mixed.dtype.element_ty)
    tl.store(mixed + cell_R[:, None] + d[None, :], out_RD, mask=(row_R < R)[:, None] & (d < D)[None, :])
    log_R = tl.where(total_R > 0, tl.log2(some_R) + peak_R, float("inf"))
    tl.store(whole + (b * G + g) * R + row_R, log_R, mask=(row_R < R) & (dims == 0))


@triton.jit
def _weigh(
    unit_sums, whole, starts, counts, mass, G, R, U, GROUP: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """The mass of some units of one KV head, summed over its query rows."""
    g, b = tl.program_id(1), tl.program_id(2)
    start, count = tl.load(starts + b).to(tl.int32), tl.load(counts + b).to(tl.int32)
    unit_U = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    written_U = (unit_U < U) & (unit_U * UNIT < start + count)
    mass_U = tl.full([UNITS], 0.0, tl.float32)
    for first in range(0, count * GROUP, ROWS):
        row_R = first + tl.arange(0, ROWS)
        at_R = (b * G + g).to(tl.int64) * R + row_R
        real_R = row_R < count * GROUP
        whole_R = tl.load(whole + at_R, mask=real_R, other=float("inf"))
        log_RU = tl.load(
            unit_sums + at_R[:, None] * U + unit_U[None, :], mask=real_R[:, None] & written_U[None, :],
            other=-float("inf"),
        )  # fmt: skip
        mass_U += tl.sum(tl.exp2(log_RU - whole_R[:, None]), 0)
    tl.store(mass + ((b * G + g) * U + unit_U), mass_U, mask=unit_U < U)
