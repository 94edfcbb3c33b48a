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
    _turn[(B * T, H + G)](
        q_BTHD.contiguous(), k_BTGD.contiguous(), v_BTGD.contiguous(), positions_B, *tables_PF, seen.units,
        seen.starts_B, seen.counts_B, turned_BTHD, turned_BTHD if to_sinks_BTHD is None else to_sinks_BTHD,
        keys_GSD, values_GSD, T, H, G, len(tables_PF[0]), keys_GSD.stride(0), seen.units.stride(0),
        seen.sinks + seen.window - 1, D // 2, triton.next_power_of_2(D // 2), seen.unit, to_sinks_BTHD is not None,
    )  # fmt: skip
    return turned_BTHD, to_sinks_BTHD


@triton.jit
def _turn(
    q, k, v, positions, cos, sin, units, starts, counts, turned, to_sinks, keys, values, T, H, G, P, head_stride,
    row_stride, last, F: tl.constexpr, F2: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One head of one token."""
    token, head = tl.program_id(0), tl.program_id(1)
    b, t, f = token // T, token % T, tl.arange(0, F2)
    real = (f < F) & (t < tl.load(counts + b).to(tl.int32))
    place = tl.load(positions + b).to(tl.int32) + t
    cos_F = tl.load(cos + place.to(tl.int64) * F + f, mask=real & (place < P), other=0.0)
    sin_F = tl.load(sin + place.to(tl.int64) * F + f, mask=real & (place < P), other=0.0)
    if head < H:
        cell = (token * H + head).to(tl.int64) * 2 * F
        a_F, b_F = tl.load(q + cell + f, mask=real, other=0.0), tl.load(q + cell + F + f, mask=real, other=0.0)
        a_F, b_F = a_F.to(tl.float32), b_F.to(tl.float32)
        tl.store(turned + cell + f, (a_F * cos_F - b_F * sin_F).to(turned.dtype.element_ty), mask=f < F)
        tl.store(turned + cell + F + f, (b_F * cos_F + a_F * sin_F).to(turned.dtype.element_ty), mask=f < F)
        if WINDOW:
            near = tl.minimum(place, last).to(tl.int64) * F
            cos_F, sin_F = tl.load(cos + near + f, mask=real, other=0.0), tl.load(sin + near + f, mask=real, other=0.0)
            tl.store(to_sinks + cell + f, (a_F * cos_F - b_F * sin_F).to(to_sinks.dtype.element_ty), mask=f < F)
            tl.store(to_sinks + cell + F + f, (b_F * cos_F + a_F * sin_F).to(to_sinks.dtype.element_ty), mask=f < F)
    else:
        g = head - H
        key = tl.load(starts + b).to(tl.int32) + t
        unit = tl.load(units + b.to(tl.int64) * row_stride + key // UNIT, mask=t < tl.load(counts + b), other=0)
        slot = (unit.to(tl.int64) * UNIT + key % UNIT) * 2 * F + g.to(tl.int64) * head_stride
        cell = (token * G + g).to(tl.int64) * 2 * F
        a_F, b_F = tl.load(k + cell + f, mask=real, other=0.0), tl.load(k + cell + F + f, mask=real, other=0.0)
        a_F, b_F = a_F.to(tl.float32), b_F.to(tl.float32)
        first_F, second_F = a_F * cos_F - b_F * sin_F, b_F * cos_F + a_F * sin_F
        tl.store(keys + slot + f, first_F.to(keys.dtype.element_ty), mask=real)
        tl.store(keys + slot + F + f, second_F.to(keys.dtype.element_ty), mask=real)
        for half in range(2):
            value_F = tl.load(v + cell + half * F + f, mask=real, other=0.0)
            tl.store(values + slot + half * F + f, value_F.to(values.dtype.element_ty), mask=real)
