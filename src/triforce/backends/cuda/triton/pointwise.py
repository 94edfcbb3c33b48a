"""Norm and gate of a decoder, each in one launch, rounded where the torch path rounds.

Shape suffixes as in kernel_api.py; I MLP size, X vectors, E elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.triton import interpreted


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of vectors (..., C) in float32; the weight is applied after rounding. A new tensor."""
    C = x.shape[-1]
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, at_once = x.numel() // C, 256 if interpreted() else 1
    if rows:
        _norm[(triton.cdiv(rows, at_once),)](x, weight, out, rows, C, eps, triton.next_power_of_2(C), at_once)
    return out


def swiglu(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """Return silu(gate) * up in the gate's shape; the gate is overwritten."""
    at_once = 1 << 14 if interpreted() else 1024
    if gate_NI.numel():
        _swiglu[(triton.cdiv(gate_NI.numel(), at_once),)](gate_NI, up_NI, gate_NI.numel(), at_once)
    return gate_NI


@triton.jit
def _norm(x, weight, out, X, C, eps, C2: tl.constexpr, SOME: tl.constexpr):
    row_X, c = tl.program_id(0) * SOME + tl.arange(0, SOME), tl.arange(0, C2)
    at_XC = row_X.to(tl.int64)[:, None] * C + c[None, :]
    mask_XC = (row_X < X)[:, None] & (c < C)[None, :]
    x_XC = tl.load(x + at_XC, mask=mask_XC, other=0.0).to(tl.float32)
    scale_X = tl.rsqrt(tl.sum(x_XC * x_XC, 1) / C + eps)
    rounded_XC = (x_XC * scale_X[:, None]).to(out.dtype.element_ty).to(tl.float32)
    weight_C = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + at_XC, (rounded_XC * weight_C[None, :]).to(out.dtype.element_ty), mask=mask_XC)


@triton.jit
def _swiglu(gate, up, E, SOME: tl.constexpr):
    at_E = tl.program_id(0).to(tl.int64) * SOME + tl.arange(0, SOME)
    gate_E = tl.load(gate + at_E, mask=at_E < E, other=0.0).to(tl.float32)
    silu_E = (gate_E / (1.0 + tl.exp(-gate_E))).to(gate.dtype.element_ty).to(tl.float32)
    up_E = tl.load(up + at_E, mask=at_E < E, other=0.0).to(tl.float32)
    tl.store(gate + at_E, (silu_E * up_E).to(gate.dtype.element_ty), mask=at_E < E)
