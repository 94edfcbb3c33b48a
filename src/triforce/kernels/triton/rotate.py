"""Rotary embedding and the write of new keys and values to their pages, in one go over a pass's tokens.

Shape suffixes as in contract.py; P positions of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.kernels.contract import Rotation
from triforce.kernels.triton.attention import Seen

HEADS = 8
"""Heads of a program."""


def rotate_and_write(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    positions_B: Tensor,
    tables_PF: Rotation,
    seen: Seen,
    memory_GSD: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Rotated queries in the memory's type; with a window, also as they meet the sinks.

    Token t of row b stands at `positions_B[b] + t` and is key `starts[b] + t` of the row's lists. Its rotated key and
    its value go there; of tokens at or beyond `counts[b]` nothing is written. Tokens must lie within the tables.
    """
    (B, T, H, D), G = q_BTHD.shape, k_BTGD.shape[2]
    keys_GSD, values_GSD = memory_GSD
    turned_BTHD = torch.empty(q_BTHD.shape, dtype=keys_GSD.dtype, device=q_BTHD.device)
    to_sinks_BTHD = torch.empty_like(turned_BTHD) if seen.window else None
    _turn[(B * T, triton.cdiv(H, HEADS) + triton.cdiv(G, HEADS))](
        q_BTHD.contiguous(), k_BTGD.contiguous(), v_BTGD.contiguous(), positions_B, *tables_PF, seen.units,
        seen.starts_B, seen.counts_B, turned_BTHD, turned_BTHD if to_sinks_BTHD is None else to_sinks_BTHD,
        keys_GSD, values_GSD, T, H, G, keys_GSD.stride(0), seen.units.stride(0), seen.sinks + seen.window - 1,
        D // 2, triton.next_power_of_2(D // 2), seen.unit, HEADS, to_sinks_BTHD is not None,
    )  # fmt: skip
    return turned_BTHD, to_sinks_BTHD


@triton.jit
def _turn(
    q, k, v, positions, cos, sin, units, starts, counts, turned, to_sinks, keys, values, T, H, G, head_stride,
    row_stride, last, F: tl.constexpr, F2: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: query heads, or key heads with their values."""
    token, tiles = tl.program_id(0), (H + HEADS - 1) // HEADS
    b, t, f = token // T, token % T, tl.arange(0, F2)[None, :]
    real = t < tl.load(counts + b).to(tl.int32)
    place = tl.load(positions + b).to(tl.int64) + t
    cos_F = tl.load(cos + place * F + f, mask=(f < F) & real, other=0.0)
    sin_F = tl.load(sin + place * F + f, mask=(f < F) & real, other=0.0)
    if tl.program_id(1) < tiles:
        head_H = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        mask_HF = (head_H < H) & (f < F)
        cell_HF = (token.to(tl.int64) * H + head_H) * 2 * F + f
        a_HF = tl.load(q + cell_HF, mask=mask_HF & real, other=0.0).to(tl.float32)
        b_HF = tl.load(q + cell_HF + F, mask=mask_HF & real, other=0.0).to(tl.float32)
        tl.store(turned + cell_HF, (a_HF * cos_F - b_HF * sin_F).to(turned.dtype.element_ty), mask=mask_HF)
        tl.store(turned + cell_HF + F, (b_HF * cos_F + a_HF * sin_F).to(turned.dtype.element_ty), mask=mask_HF)
        if WINDOW:
            near = tl.minimum(place, last) * F
            cos_F = tl.load(cos + near + f, mask=(f < F) & real, other=0.0)
            sin_F = tl.load(sin + near + f, mask=(f < F) & real, other=0.0)
            tl.store(to_sinks + cell_HF, (a_HF * cos_F - b_HF * sin_F).to(to_sinks.dtype.element_ty), mask=mask_HF)
            tl.store(to_sinks + cell_HF + F, (b_HF * cos_F + a_HF * sin_F).to(to_sinks.dtype.element_ty), mask=mask_HF)
    else:
        head_G = ((tl.program_id(1) - tiles) * HEADS + tl.arange(0, HEADS))[:, None]
        mask_GF = (head_G < G) & (f < F) & real
        key = tl.load(starts + b).to(tl.int32) + t
        unit = tl.load(units + b.to(tl.int64) * row_stride + key // UNIT, mask=real, other=0).to(tl.int64)
        slot_GF = head_G.to(tl.int64) * head_stride + (unit * UNIT + key % UNIT) * 2 * F + f
        cell_GF = (token.to(tl.int64) * G + head_G) * 2 * F + f
        a_GF = tl.load(k + cell_GF, mask=mask_GF, other=0.0).to(tl.float32)
        b_GF = tl.load(k + cell_GF + F, mask=mask_GF, other=0.0).to(tl.float32)
        tl.store(keys + slot_GF, (a_GF * cos_F - b_GF * sin_F).to(keys.dtype.element_ty), mask=mask_GF)
        tl.store(keys + slot_GF + F, (b_GF * cos_F + a_GF * sin_F).to(keys.dtype.element_ty), mask=mask_GF)
        for half in tl.static_range(2):
            value_GF = tl.load(v + cell_GF + half * F, mask=mask_GF, other=0.0)
            tl.store(values + slot_GF + half * F, value_GF.to(values.dtype.element_ty), mask=mask_GF)
