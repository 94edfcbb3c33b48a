"""Paged attention: queries over lists of units, split over the keys, with a merge in a fixed order.

A list is cut into splits of `split` keys, counted from its start. Each split is one program for each KV head, in which
the query heads of a group are rows of one tile; it goes through its keys in blocks. Splits are merged in ascending
order. Neither the splits nor the order of the merge depends on a list's length, and keys that a query does not see add
exact zeros. A query's bits thus depend on its own keys and on the shape of the pass (see `ForwardBatch.min_shape`).

Scores are in base 2. For the mass, a split stores the log-sum-exp of each query row and unit; a third kernel then adds
up 2 ** (log-sum-exp of the unit - log-sum-exp of the row).

Shape suffixes as in kernel_api.py; R = T * H / G query rows of a KV head, N splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.splits import split_of
from triforce.backends.cuda.triton import interpreted, multiplied_as, on_amd, on_nvidia
from triforce.backends.cuda.triton.kv_tiles import (
    load_rows,
    load_scales,
    mixed_block,
    query_codes,
    rotated_heads,
    with_scales,
)

FEW_ROWS = 16
"""Most query rows of a KV head for which several programs merge a row. It gains time at 4 rows, and none at 32."""


def merge(
    parts: tuple[Tensor, Tensor, Tensor],
    spans: tuple[Tensor, Tensor],
    attn_out_BTHD: Tensor,
    log_sums_BGR: Tensor,
    split: int,
    hadamard_size: int,
) -> None:
    """Write the mixed values, and the log-sum-exp of each query row in base 2.

    parts: sums (B, G, N, R, D), peaks and totals (B, G, N, R) of splits of `split` keys. spans: starts and counts (B).
    Few query rows have several programs each, as one program a row leaves a device idle. With rotated heads a program
    has all channels, and rotates blocks of `hadamard_size` back; 1: no rotation.
    """
    B, G, N, R, D = parts[0].shape
    T, H = attn_out_BTHD.shape[1:3]
    splits_at_once, rows = (
        (8, 16) if interpreted() else (32, 1)
    )  # an interpreted program takes milliseconds, whatever it does
    padded_dim = max(16, triton.next_power_of_2(D))
    dims = min(32, padded_dim) if R <= FEW_ROWS and hadamard_size == 1 else padded_dim
    _merge[(triton.cdiv(R, rows), G * triton.cdiv(D, dims), B)](
        *parts, *spans, attn_out_BTHD, log_sums_BGR, G, T, R, N, split, H // G, D, dims, splits_at_once, rows,
        hadamard_size,
    )  # fmt: skip


def write_unit_mass(
    units_BGRU: Tensor, log_sums_BGR: Tensor, spans: tuple[Tensor, Tensor], mass_BGU: Tensor, group: int, unit: int
) -> None:
    """Write the mass of each unit, from the log-sum-exps of its keys and of the query rows."""
    B, G, R, U = units_BGRU.shape
    _weigh[(triton.cdiv(U, 64), G, B)](units_BGRU, log_sums_BGR, *spans, mass_BGU, G, R, U, group, unit, 16, 64)


@triton.jit
def _merge(
    parts, peaks, sums, starts, counts, attn_out, log_sums, G, T, R, N, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some query rows and dimensions, in ascending order; zeros where there are fewer queries."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1) % G
    b = tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(counts + b).to(tl.int32)
    dims = tl.program_id(1) // G
    d = dims * DIMS + tl.arange(0, DIMS)
    token_R = row_R // GROUP
    real_R = row_R < count * GROUP
    used = tl.where(tl.program_id(0) * ROWS < count * GROUP, (start + count + SPLIT - 1) // SPLIT, 0)
    peak_R = tl.full([ROWS], -float("inf"), tl.float32)
    total_R = tl.full([ROWS], 0.0, tl.float32)
    head = (b * G + g).to(tl.int64) * N
    attn_out_RD = tl.full([ROWS, DIMS], 0.0, tl.float32)
    for first_split in tl.range(0, used, SPLITS, num_stages=3):
        split_N = first_split + tl.arange(0, SPLITS)
        at_NR = (head + split_N)[:, None] * R + row_R[None, :]
        used_NR = (split_N < used)[:, None] & real_R[None, :]
        peak_NR = tl.load(peaks + at_NR, mask=used_NR, other=-float("inf"))
        new_peak_R = tl.maximum(peak_R, tl.max(peak_NR, 0))
        base_R = tl.where(new_peak_R == -float("inf"), 0.0, new_peak_R)
        decay_R = tl.exp2(peak_R - base_R)
        attn_out_RD = attn_out_RD * decay_R[:, None]
        total_R = total_R * decay_R
        peak_R = new_peak_R
        share_NR = tl.exp2(peak_NR - base_R[None, :])
        sum_NR = tl.load(sums + at_NR, mask=used_NR, other=0.0)
        mask_NRD = used_NR[:, :, None] & (d < D)[None, None, :]
        part_NRD = tl.load(parts + at_NR[:, :, None] * D + d[None, None, :], mask=mask_NRD, other=0.0)
        attn_out_RD += tl.sum(part_NRD * share_NR[:, :, None], 0)
        total_R += tl.sum(sum_NR * share_NR, 0)
    divisor_R = tl.where(total_R > 0, total_R, 1.0)
    cell_R = ((b * T + token_R) * G * GROUP + g * GROUP + row_R % GROUP) * D
    out_RD = rotated_heads(attn_out_RD / divisor_R[:, None], d[None, :], HADAMARD_SIZE).to(attn_out.dtype.element_ty)
    tl.store(attn_out + cell_R[:, None] + d[None, :], out_RD, mask=(row_R < R)[:, None] & (d < D)[None, :])
    log_R = tl.where(total_R > 0, tl.log2(divisor_R) + peak_R, float("inf"))
    tl.store(log_sums + (b * G + g) * R + row_R, log_R, mask=(row_R < R) & (dims == 0))


@triton.jit
def _weigh(
    unit_sums, log_sums, starts, counts, mass, G, R, U, GROUP: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Store the mass of some units of one KV head, summed over its query rows."""
    g = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(counts + b).to(tl.int32)
    unit_U = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    written_U = (unit_U < U) & (unit_U * UNIT < start + count)
    mass_U = tl.full([UNITS], 0.0, tl.float32)
    for first_row in range(0, count * GROUP, ROWS):
        row_R = first_row + tl.arange(0, ROWS)
        at_R = (b * G + g).to(tl.int64) * R + row_R
        real_R = row_R < count * GROUP
        log_sum_R = tl.load(log_sums + at_R, mask=real_R, other=float("inf"))
        log_RU = tl.load(
            unit_sums + at_R[:, None] * U + unit_U[None, :], mask=real_R[:, None] & written_U[None, :],
            other=-float("inf"),
        )  # fmt: skip
        mass_U += tl.sum(tl.exp2(log_RU - log_sum_R[:, None]), 0)
    tl.store(mass + ((b * G + g) * U + unit_U), mass_U, mask=unit_U < U)


class Tile(NamedTuple):
    """Most query rows of a program (further rows read the keys again), keys of a block, warps, and stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_of(size: int, dim: int, rows: int, coded: bool = False) -> Tile:
    """Return the tile for numbers of `size` bytes, heads of `dim`, and `rows` query rows of a KV head.

    It is the best one for all shapes measured on an H200, among tiles that hardly spill on any device (see
    docs/contributing/gpu-kernels.md). With few warps several programs share a multiprocessor, and one computes while
    others wait for keys. Tiles of AMD have not been measured. The tile of codes and more than 16 rows has not been
    measured since scales load in pairs.
    """
    if size == 4:
        return Tile(16, 16, 4, 1)  # other tiles spill more: ptxas favours many programs per multiprocessor
    if dim > 128 or (coded and on_amd()):
        return Tile(32, 32, 8, 3)  # with two stages ptxas spills for sm_80
    if on_amd():
        return Tile(64, 64, 8, 3)
    if rows <= 16:
        return Tile(16, 64, 2, 3)
    if coded:
        return Tile(32, 64, 4, 3)
    return Tile(32, 32, 2, 4) if rows <= 32 else Tile(64, 32, 4, 4)


@dataclass(frozen=True, slots=True)
class DevicePageTable:
    """Page table on the device: `kernel_api.PageTable` with its integers as tensors (B)."""

    units: Tensor
    starts_B: Tensor
    counts_B: Tensor
    unit: int
    sinks: int = 0
    window: int = 0


def attend(
    q_BTHD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    page_table: DevicePageTable,
    return_mass: bool = False,
    q_sinks_BTHD: Tensor | None = None,
    split: int | None = None,
    hadamard_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return mixed values (B, T, H, D), and the mass of each unit, float32 (B, G, U), if `return_mass`.

    Both are those of a `LayerAttention`; int8 memory has the layout of `kv_pages`. `split`: keys of a split, a multiple
    of 64.
    `hadamard_size`: block size of the rotation that mixed values are rotated back by. The host does not wait.
    """
    B, T, H, D = q_BTHD.shape
    G = len(k_GSD)
    U = page_table.units.shape[-1]
    by_head = page_table.units.ndim == 3
    R = T * H // G
    split = split or split_of(by_head, page_table.window, H // G)
    N = max(1, -(-U * page_table.unit // split))
    *memory, coded = with_scales((k_GSD, v_GSD))
    factor = multiplied_as(q_BTHD, coded)
    tile = tile_of(q_BTHD.element_size(), D, R, coded)
    at_once = min(tile.rows, max(16, triton.next_power_of_2(R)))
    attn_out_BTHD = torch.empty_like(q_BTHD)
    D2 = max(32 if coded else 16, triton.next_power_of_2(D))
    new = q_BTHD.new_empty
    parts_BGNRD, peaks_BGNR, sums_BGNR = (new(B, G, N, R, *d, dtype=torch.float32) for d in ((D,), (), ()))
    log_sums_BGR = new(B, G, R, dtype=torch.float32)
    units_BGRU = new((B, G, R, U) if return_mass else (1,), dtype=torch.float32)
    _splits[(N, G * triton.cdiv(R, at_once), B)](
        q_BTHD, q_BTHD if q_sinks_BTHD is None else q_sinks_BTHD, *memory, page_table.units, page_table.starts_B,
        page_table.counts_B, parts_BGNRD, peaks_BGNR, sums_BGNR, units_BGRU, G, T, R, U, N, k_GSD.stride(0),
        page_table.units.stride(0), page_table.units.stride(1) if by_head else 0, D**-0.5 * log2(e), page_table.sinks,
        page_table.window, split, H // G, D, D2, page_table.unit, at_once, tile.keys, q_sinks_BTHD is not None,
        return_mass, coded, factor, on_nvidia() and factor == tl.bfloat16 and D % 4 == 0, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    merge(
        (parts_BGNRD, peaks_BGNR, sums_BGNR), (page_table.starts_B, page_table.counts_B), attn_out_BTHD, log_sums_BGR,
        split, hadamard_size,
    )  # fmt: skip
    mass_BGU = new((B, G, U) if return_mass else (0,), dtype=torch.float32)
    if return_mass and U:
        write_unit_mass(
            units_BGRU, log_sums_BGR, (page_table.starts_B, page_table.counts_B), mass_BGU, H // G, page_table.unit
        )
    return attn_out_BTHD, mass_BGU


@triton.jit
def _product(q_RD, q_scale_R, k_DK, FACTOR: tl.constexpr):
    """Return queries times keys; for codes an exact sum of integers, times the scale of each query."""
    if k_DK.dtype == tl.int8:
        product_RK = tl.dot(q_RD, k_DK, out_dtype=tl.int32).to(tl.float32) * q_scale_R[:, None]
    else:
        product_RK = tl.dot(q_RD, k_DK.to(FACTOR), input_precision="ieee")
    return product_RK


@triton.jit
def _scores(
    q_RD, q_scale_R, q_sinks_RD, q_sinks_scale_R, k_DK, key_K, place_R1, real_R1, block, scale, sinks, window,
    SINK_QUERIES: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return scores of a block of keys in base 2; -inf where a query does not see the key. Sinks have own queries."""
    scores_RK = _product(q_RD, q_scale_R, k_DK, FACTOR)
    if SINK_QUERIES:  # noqa: SIM102
        if block < sinks:
            to_sinks_RK = _product(q_sinks_RD, q_sinks_scale_R, k_DK, FACTOR)
            scores_RK = tl.where((key_K < sinks)[None, :], to_sinks_RK, scores_RK)
    visible_RK = real_R1 & (key_K[None, :] <= place_R1)
    if window > 0:
        visible_RK &= (key_K < sinks)[None, :] | (key_K[None, :] > place_R1 - window)
    return tl.where(visible_RK, scores_RK * scale, -float("inf"))


@triton.jit
def _queries(q, cells_RD, mask_RD, CODED: tl.constexpr, FACTOR: tl.constexpr):
    """Return queries in the type that multiplies keys, and for codes the scale of each query, else 1."""
    q_RD = tl.load(q + cells_RD, mask=mask_RD, other=0.0)
    if CODED:  # noqa: SIM108
        queries_and_factor = query_codes(q_RD.to(tl.float32))
    else:
        queries_and_factor = q_RD.to(FACTOR), 1.0
    return queries_and_factor


@triton.jit
def _store_unit_sums(
    unit_sums, shares_RK, base_R, at_R, real_R, block, U, UNIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Store the log-sum-exp of each unit in a block of keys, from `at_R` on."""
    per_unit_RU = tl.sum(tl.reshape(shares_RK, [ROWS, KEYS // UNIT, UNIT]), 2)
    positive_RU = tl.where(per_unit_RU > 0, per_unit_RU, 1.0)
    log_RU = tl.where(per_unit_RU > 0, tl.log2(positive_RU) + base_R[:, None], -float("inf"))
    unit_U = block // UNIT + tl.arange(0, KEYS // UNIT)
    tl.store(unit_sums + at_R[:, None] + unit_U[None, :], log_RU, mask=real_R[:, None] & (unit_U < U)[None, :])


@triton.jit
def _splits(
    q, q_sinks, keys, values, key_scales, value_scales, units, starts, counts, parts, peaks, sums, unit_sums, G, T, R,
    U, N, head_stride, row_stride, list_stride, scale, sinks, window, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SINK_QUERIES: tl.constexpr, RETURN_MASS: tl.constexpr, CODED: tl.constexpr, FACTOR: tl.constexpr,
    BY_PTX: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one KV head's keys with some query rows: store unnormalised sums and their peak."""
    n = tl.program_id(0)
    g = tl.program_id(1) % G
    b = tl.program_id(2)
    start = tl.load(starts + b).to(tl.int32)
    count = tl.load(counts + b).to(tl.int32)
    row_R = (tl.program_id(1) // G) * ROWS + tl.arange(0, ROWS)
    token_R = row_R // GROUP
    end = start + count
    first_key = n * SPLIT
    if (first_key >= end) | (tl.program_id(1) // G * ROWS >= count * GROUP):
        return
    d = tl.arange(0, D2)
    real_R1 = (token_R < count)[:, None]
    place_R1 = start + token_R[:, None]
    cells_RD = ((b * T + token_R) * G * GROUP + g * GROUP + row_R % GROUP)[:, None] * D + d[None, :]
    query_mask_RD = real_R1 & (d < D)[None, :]
    q_RD, q_scale_R = _queries(q, cells_RD, query_mask_RD, CODED, FACTOR)
    q_sinks_RD, q_sinks_scale_R = (
        _queries(q_sinks, cells_RD, query_mask_RD, CODED, FACTOR) if SINK_QUERIES else (q_RD, q_scale_R)
    )
    peak_R = tl.full([ROWS], -float("inf"), tl.float32)
    sum_R = tl.full([ROWS], 0.0, tl.float32)
    attn_out_RD = tl.full([ROWS, D2], 0.0, tl.float32)
    table = units + b.to(tl.int64) * row_stride + g.to(tl.int64) * list_stride
    head = g.to(tl.int64) * head_stride
    for block in range(first_key, min(first_key + SPLIT, end), KEYS):
        key_K = block + tl.arange(0, KEYS)
        in_list_K = key_K < end
        unit_K = tl.load(table + key_K // UNIT, mask=in_list_K, other=0).to(tl.int32 if CODED else tl.int64)
        slot_K = unit_K * UNIT + key_K % UNIT
        k_DK = load_rows(keys, head, slot_K[None, :], d[:, None], in_list_K[None, :], D, CODED)
        key_scale = scale
        value_scale = 1.0
        if CODED:
            key_scales_1K, value_scale = load_scales(key_scales, value_scales, table, head, block, end, D, UNIT, KEYS)
            key_scale = scale * key_scales_1K
        scores_RK = _scores(
            q_RD, q_scale_R, q_sinks_RD, q_sinks_scale_R, k_DK, key_K, place_R1, real_R1, block, key_scale, sinks,
            window, SINK_QUERIES, FACTOR,
        )  # fmt: skip
        new_peak_R = tl.maximum(peak_R, tl.max(scores_RK, 1))
        base_R = tl.where(new_peak_R == -float("inf"), 0.0, new_peak_R)
        shares_RK = tl.exp2(scores_RK - base_R[:, None])
        decay_R = tl.exp2(peak_R - base_R)
        block_RD = mixed_block(shares_RK * value_scale, values, head, slot_K, in_list_K, D, D2, CODED, FACTOR, BY_PTX)
        attn_out_RD = attn_out_RD * decay_R[:, None] + block_RD
        sum_R = sum_R * decay_R + tl.sum(shares_RK, 1)
        peak_R = new_peak_R
        if RETURN_MASS:
            at_R = ((b * G + g).to(tl.int64) * R + row_R) * U
            _store_unit_sums(unit_sums, shares_RK, base_R, at_R, row_R < R, block, U, UNIT, ROWS, KEYS)
    part_R = ((b * G + g).to(tl.int64) * N + n) * R + row_R
    tl.store(peaks + part_R, peak_R, mask=row_R < R)
    tl.store(sums + part_R, sum_R, mask=row_R < R)
    tl.store(parts + part_R[:, None] * D + d[None, :], attn_out_RD, mask=(row_R < R)[:, None] & (d < D)[None, :])
