"""All operations between matrix products, one launch each: norm, gate, and rotary embedding with the write to pages.

Norm and gate are rounded where the torch path rounds. Shape suffixes as in kernel_api.py; I MLP size, X vectors,
P positions of the tables, M heads of tokens. Inputs may be slices of one product, with gaps between tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.kv_pages import is_coded
from triforce.backends.cuda.triton import interpreted
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.cuda.triton.kv_tiles import rotated_heads, store_rows, with_scales
from triforce.backends.kernel_api import KeysValues, Rotation


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of vectors (..., C), in float32, the weight applied after rounding: a contiguous tensor."""
    C = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    at_once = 256 if interpreted() else 1
    if rows := x.numel() // C:
        x_XHC = _contiguous_tokens(x if x.ndim == 3 else x.reshape(-1, 1, C))
        grid = (triton.cdiv(rows, at_once),)
        token_stride = x_XHC.stride(0)
        _norm[grid](x_XHC, weight, out, rows, x_XHC.shape[1], token_stride, C, eps, triton.next_power_of_2(C), at_once)
    return out


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Return silu(gate) * up, of their shape (..., I): a contiguous tensor."""
    out = torch.empty(gate_NI.shape, dtype=gate_NI.dtype, device=gate_NI.device)
    if gate_NI.numel():
        size = gate_NI.shape[-1]
        rows = 256 if interpreted() else 1
        columns = triton.next_power_of_2(size) if interpreted() else 1024
        gate_X1I, up_X1I = (_contiguous_tokens(x.reshape(-1, 1, size)) for x in (gate_NI, up_NI))
        _swiglu[(triton.cdiv(len(gate_X1I), rows), triton.cdiv(size, columns))](
            gate_X1I, up_X1I, out, len(gate_X1I), size, gate_X1I.stride(0), up_X1I.stride(0), columns, rows
        )
    return out


def _contiguous_tokens(x_XHC: Tensor) -> Tensor:
    """Return `x_XHC` if the vectors (H, C) of each token are contiguous, else a copy; tokens may have gaps."""
    is_contiguous = x_XHC.stride(2) == 1 and (x_XHC.shape[1] == 1 or x_XHC.stride(1) == x_XHC.shape[2])
    return x_XHC if is_contiguous else x_XHC.contiguous()


def rotate_and_write(
    qkv: tuple[Tensor, Tensor, Tensor], positions_B: Tensor, tables_PF: Rotation, page_table: DevicePageTable,
    kv: KeysValues, hadamard_size: int = 1,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Write rotated keys, and values; return rotated queries, and with a window also queries for the sinks.

    Queries have the memory's type, or their own where memory has codes. Token t of row b has position
    `positions_B[b] + t` and is key `starts[b] + t` of the row's list, where its key and value are written; tokens at or
    beyond `counts[b]` are not written. Positions must lie within the tables. Blocks of `hadamard_size` channels of all
    heads are then rotated by Hadamard matrices; 1: none.
    """
    q_BTHD, k_BTGD, _ = qkv
    keys_GSD = kv[0]
    B, T, H, D = q_BTHD.shape
    G = k_BTGD.shape[2]
    q_NHD, k_NGD, v_NGD = (_contiguous_tokens(x.flatten(0, 1)) for x in qkv)
    dtype = q_BTHD.dtype if is_coded(keys_GSD) else keys_GSD.dtype
    turned_BTHD = torch.empty(q_BTHD.shape, dtype=dtype, device=q_BTHD.device)
    to_sinks_BTHD = torch.empty_like(turned_BTHD) if page_table.window else None
    at_once = 256 if interpreted() else 8
    D2 = triton.next_power_of_2(D)
    _turn_queries[(triton.cdiv(B * T * H, at_once),)](
        q_NHD, positions_B, *tables_PF, page_table.counts_B, turned_BTHD,
        turned_BTHD if to_sinks_BTHD is None else to_sinks_BTHD, B * T * H, T, H, q_NHD.stride(0),
        page_table.sinks + page_table.window - 1, D, D2, at_once, hadamard_size, to_sinks_BTHD is not None,
    )  # fmt: skip
    *memory, coded = with_scales(kv)
    _write[(triton.cdiv(B * T * G, at_once),)](
        k_NGD, v_NGD, positions_B, *tables_PF, page_table.units, page_table.starts_B, page_table.counts_B, *memory,
        B * T * G, T, G, k_NGD.stride(0), v_NGD.stride(0), keys_GSD.stride(0), page_table.units.stride(0), D, D2,
        page_table.unit, at_once, hadamard_size, coded,
    )  # fmt: skip
    return turned_BTHD, to_sinks_BTHD


@triton.jit
def _norm(x, weight, out, X, H, stride, C, eps, C2: tl.constexpr, VECTORS: tl.constexpr):
    row_X = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    c = tl.arange(0, C2)
    from_X = (row_X // H).to(tl.int64) * stride + row_X % H * C
    at_XC = row_X.to(tl.int64)[:, None] * C + c[None, :]
    mask_XC = (row_X < X)[:, None] & (c < C)[None, :]
    x_XC = tl.load(x + from_X[:, None] + c[None, :], mask=mask_XC, other=0.0).to(tl.float32)
    scale_X = tl.rsqrt(tl.sum(x_XC * x_XC, 1) / C + eps)
    rounded_XC = (x_XC * scale_X[:, None]).to(out.dtype.element_ty).to(tl.float32)
    weight_C = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + at_XC, (rounded_XC * weight_C[None, :]).to(out.dtype.element_ty), mask=mask_XC)


@triton.jit
def _swiglu(gate, up, out, X, size, gate_stride, up_stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row_X1 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask_XI = (row_X1 < X) & (i < size)
    gate_XI = tl.load(gate + row_X1 * gate_stride + i, mask=mask_XI, other=0.0).to(tl.float32)
    silu_XI = (gate_XI / (1.0 + tl.exp(-gate_XI))).to(out.dtype.element_ty).to(tl.float32)
    up_XI = tl.load(up + row_X1 * up_stride + i, mask=mask_XI, other=0.0).to(tl.float32)
    tl.store(out + row_X1 * size + i, (silu_XI * up_XI).to(out.dtype.element_ty), mask=mask_XI)


@triton.jit
def _turned(x, at_M, place_M, cos, sin, d_1D, real_M, D: tl.constexpr, HADAMARD_SIZE: tl.constexpr):
    """Return heads that begin at `at_M`, turned by RoPE and then Hadamard-rotated, float32; zeros where not real."""
    real_MD = real_M[:, None] & (d_1D < D)
    turn_MD = place_M[:, None] * (D // 2) + d_1D % (D // 2)
    x_MD = tl.load(x + at_M[:, None] + d_1D, mask=real_MD, other=0.0).to(tl.float32)
    pair_MD = tl.load(x + at_M[:, None] + (d_1D + D // 2) % D, mask=real_MD, other=0.0).to(tl.float32)
    cos_MD = tl.load(cos + turn_MD, mask=real_MD, other=0.0)
    sin_MD = tl.load(sin + turn_MD, mask=real_MD, other=0.0)
    return rotated_heads(x_MD * cos_MD + pair_MD * tl.where(d_1D < D // 2, -sin_MD, sin_MD), d_1D, HADAMARD_SIZE)


@triton.jit
def _turn_queries(
    q, positions, cos, sin, counts, turned, to_sinks, M, T, H, token_stride, window_end, D: tl.constexpr,
    D2: tl.constexpr, HEADS: tl.constexpr, HADAMARD_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Turn some query heads of some tokens; zeros where a row of the batch has fewer tokens."""
    head_M = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d_1D = tl.arange(0, D2)[None, :]
    b_M = head_M // H // T
    t_M = head_M // H % T
    real_M = t_M < tl.load(counts + b_M, mask=head_M < M, other=0)
    place_M = tl.load(positions + b_M, mask=head_M < M, other=0).to(tl.int64) + t_M
    cell_MD = head_M.to(tl.int64)[:, None] * D + d_1D
    mask_MD = (head_M < M)[:, None] & (d_1D < D)
    from_M = (head_M // H).to(tl.int64) * token_stride + head_M % H * D
    x_MD = _turned(q, from_M, place_M, cos, sin, d_1D, real_M, D, HADAMARD_SIZE)
    tl.store(turned + cell_MD, x_MD.to(turned.dtype.element_ty), mask=mask_MD)
    if WINDOW:
        x_MD = _turned(q, from_M, tl.minimum(place_M, window_end), cos, sin, d_1D, real_M, D, HADAMARD_SIZE)
        tl.store(to_sinks + cell_MD, x_MD.to(to_sinks.dtype.element_ty), mask=mask_MD)


@triton.jit
def _write(
    k, v, positions, cos, sin, units, starts, counts, keys, values, key_scales, value_scales, M, T, G, k_stride,
    v_stride, head_stride, row_stride, D: tl.constexpr, D2: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    HADAMARD_SIZE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Write the turned keys and the values of some heads of some tokens."""
    head_M = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d_1D = tl.arange(0, D2)[None, :]
    b_M = head_M // G // T
    t_M = head_M // G % T
    real_M = (head_M < M) & (t_M < tl.load(counts + b_M, mask=head_M < M, other=0))
    place_M = tl.load(positions + b_M, mask=real_M, other=0).to(tl.int64) + t_M
    key_M = tl.load(starts + b_M, mask=real_M, other=0).to(tl.int64) + t_M
    unit_M = tl.load(units + b_M.to(tl.int64) * row_stride + key_M // UNIT, mask=real_M, other=0).to(tl.int64)
    memory_M = (head_M % G).to(tl.int64) * head_stride
    slot_M = unit_M * UNIT + key_M % UNIT
    token_M = (head_M // G).to(tl.int64)
    head_offset_M = head_M % G * D
    k_MD = _turned(k, token_M * k_stride + head_offset_M, place_M, cos, sin, d_1D, real_M, D, HADAMARD_SIZE)
    store_rows(keys, key_scales, memory_M, slot_M, d_1D, k_MD, real_M, D, CODED)
    from_MD = (token_M * v_stride + head_offset_M)[:, None] + d_1D
    v_MD = tl.load(v + from_MD, mask=real_M[:, None] & (d_1D < D), other=0.0).to(tl.float32)
    store_rows(values, value_scales, memory_M, slot_M, d_1D, rotated_heads(v_MD, d_1D, HADAMARD_SIZE), real_M, D, CODED)
