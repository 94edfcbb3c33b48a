"""Errors of each kernel against float64, on every level: below the stated bound, and not far below it.

The stated bounds are in docs/data/kernel_errors.toml, and docs/results/kernels.md shows them.

Shape suffixes as in paged.py; N tokens or rows, K inputs, M outputs, C hidden size, V vocabulary.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gguf_blocks import KINDS, random_blocks
from tests.helpers.paged_kv import Paged, by_the_book, native, slots, visible
from tests.helpers.random_tensors import normal
from tests.helpers.samplers import native_sampling, noise_for
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import ints
from triforce.speculation import Draft, Rejection, SequenceState

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")

DATA = Path(__file__).parents[3] / "docs" / "data" / "kernel_errors.toml"
STATED = {
    kernel["name"]: {torch.float32: 2.0 ** kernel["float32"], torch.bfloat16: 2.0 ** kernel["bfloat16"]}
    for kernel in tomllib.loads(DATA.read_text(encoding="utf-8"))["kernels"]
}
SLACK = 8
"""Lowest share of the stated bound that an error may have: a bound that is never approached says nothing."""


def attention(dtype: torch.dtype, int8: bool = False) -> tuple[Tensor, Tensor]:
    """Return errors of values and of mass: few and many queries, short and long contexts, sharp and flat attention."""
    mixed_errors = []
    mass_errors = []
    for D, T, S, gain in [
        (64, 1, 3000, 1.0),
        (80, 16, 700, 4.0),
        (128, 5, 70, 1.0),
        (256, 40, 300, 0.1),
        (96, 2, 9, 8.0),
    ]:
        kv = Paged(2, D, 200, dtype, int8=int8)
        row = kv.row(S)
        q_BTHD = kv.normal(1, T, 8, D, gain=gain)
        attn_out = torch.empty_like(q_BTHD)
        mass = torch.empty(1, 2, len(row.list_P))
        kv.pages.attend(q_BTHD, [S - T], [T], row.list_P[None], attn_out, mass, coarse=[S - T] if int8 else [])
        reference, wanted_mass = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible(S - T, T, S))
        mixed_errors.append((attn_out[0].double() - reference).abs().flatten() / row.v_SGD.double().abs().max())
        mass_errors.append((mass[0].double() - wanted_mass).abs().flatten() / (T * 4))
    return torch.cat(mixed_errors), torch.cat(mass_errors)


def product(dtype: torch.dtype, bits: int = 0) -> Tensor:
    N, K, M = 20, 4096, 100
    w_MK, x_NK, y_NM = normal(M, K).to(dtype), normal(N, K, seed=1).to(dtype), torch.empty(N, M)
    native.Matrix(w_MK, bits=bits).linear(x_NK, y_NM)
    w, x = w_MK.double(), x_NK.double()
    return (y_NM - x @ w.T).abs() / (x.abs() @ w.abs().T)


def gguf_product(kind: str, dtype: torch.dtype) -> Tensor:
    """Return errors of a product.

    The weights are exact, so the error is that of the rounded input, if it is rounded.
    """
    N = 20
    K = 4096
    M = 100
    weight = random_blocks(kind, M, K, dtype == torch.bfloat16)
    x_NK = normal(N, K, seed=1).to(dtype)
    y_NM = torch.empty(N, M)
    native.Matrix(weight).linear(x_NK, y_NM)
    w = weight.weights_MK()
    x = x_NK.double()
    some_M = w.any(1)
    return (y_NM - x @ w.T)[:, some_M].abs() / (x.abs() @ w[some_M].abs().T)


def norm(dtype: torch.dtype) -> Tensor:
    """Return errors of the norm, through a head whose matrix is the identity, so that its products are exact."""
    C = 1000
    x_NC = normal(30, C, seed=1) * normal(30, 1, seed=2).exp()
    weight_C = (1 + 0.1 * normal(C)).to(dtype)
    y_NC = torch.empty_like(x_NC)
    native.LmHead(weight_C, native.Matrix(torch.eye(C, dtype=dtype)), eps=1e-5).logits(x_NC, y_NC)
    x = x_NC.double()
    exact = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight_C.double()
    return (y_NC - exact).abs() / exact.abs()


def rotation(dtype: torch.dtype) -> Tensor:
    """Return errors of rotated keys, read back from their pages."""
    N = 100
    G = 2
    D = 64
    kv = Paged(G, D, 20, dtype)
    q = normal(N, G * D)
    k = normal(N, G * D, seed=1)
    v = normal(N, G * D, seed=2)
    angle_NF = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    cos = angle_NF.cos()
    sin = angle_NF.sin()
    place_N = slots(kv.take(N), N)
    kv.pages.rope_and_write(q, k, v, cos, sin, torch.arange(N), place_N, rotated=torch.empty(N, G, D, dtype=dtype))
    got_k = torch.empty(N, G, D, dtype=dtype)
    got_v = torch.empty(N, G, D, dtype=dtype)
    kv.pages.read(place_N, got_k, got_v)
    assert torch.equal(got_v, v.view(N, G, D).to(dtype))
    lower_half, upper_half = k.view(N, G, 2, D // 2).double().unbind(2)
    c = cos.double()[:, None]
    s = sin.double()[:, None]
    exact = torch.cat([lower_half * c - upper_half * s, upper_half * c + lower_half * s], -1)
    return (got_k.double() - exact).abs() / torch.hypot(lower_half, upper_half).repeat(1, 1, 2)


def gate(dtype: torch.dtype) -> Tensor:
    """Return errors of a gate in a block without other work: the norm of its x is 1, other products have one term."""
    M = 4096
    C = 16
    zeros_CC = torch.zeros(C, C, dtype=dtype)
    one_C = torch.ones(C, dtype=dtype)
    x_NC = torch.full((1, C), 2.0**-60)
    gates_M = (30 * normal(M)).clamp(-80, 80).to(dtype)
    ups_M = normal(M, seed=1).to(dtype)
    results = []
    for begin in range(0, M, C):
        gate_MC = torch.zeros(C, C, dtype=dtype)
        up_MC = torch.zeros(C, C, dtype=dtype)
        gate_MC[:, 0] = gates_M[begin : begin + C]
        up_MC[:, 0] = ups_M[begin : begin + C]
        block = native.DecoderLayer(
            one_C, zeros_CC, zeros_CC, zeros_CC, zeros_CC, one_C, gate_MC, up_MC, torch.eye(C, dtype=dtype),
            *[None] * 5, head_dim=16, eps=0.0,
        )  # fmt: skip
        x = x_NC.clone()
        block.finish(x, torch.zeros(1, C, dtype=dtype))
        results.append(x[0])
    gates = gates_M.double()
    ups = ups_M.double()
    exact = gates * gates.sigmoid() * ups
    large = exact.abs() > 2.0**-30  # the residual stream's own 2^-60 is nothing beside it
    assert large.sum() > M / 2
    return ((torch.cat(results) - exact).abs() / exact.abs())[large]


def sampling(dtype: torch.dtype) -> Tensor:
    """Return errors of the probabilities of float32 logits, for any weights."""
    V = 3000
    params = [SamplingParams(temperature=t) for t in (0.3, 1.0, 1.7)]
    prefix = SequenceState(ints([0] * 6).reshape(3, 2), ints([1] * 3))
    logits_BV = 4 * normal(3, V)
    noise = noise_for(native_sampling, [0, 1, 2], [0, 1, 2])
    sampler = native_sampling(params, [1] * 3, V, Rejection(noise))
    live_B = np.ones(3, dtype=np.bool_)
    law_BV = sampler.verify(Draft.empty(3, V), logits_BV[:, None], prefix, live_B, 0).probs_BKV[:, 0]
    scores_BV = (logits_BV.double() - logits_BV.double().amax(1, keepdim=True)) / torch.tensor(
        [[0.3], [1.0], [1.7]], dtype=torch.double
    )
    exact_BV = scores_BV.softmax(1)
    return (law_BV - exact_BV).abs() / exact_BV


KERNELS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "attention, mixed values": lambda dtype: attention(dtype)[0],
    "attention, mass of a page": lambda dtype: attention(dtype)[1],
    "product with weights": product,
    "RMSNorm": norm,
    "rotation and write": rotation,
    "SiLU gate": gate,
    "probabilities": sampling,
    "int8, mixed values": lambda dtype: attention(dtype, int8=True)[0],
    "int8, mass of a page": lambda dtype: attention(dtype, int8=True)[1],
    "int8, product with weights": partial(product, bits=8),
    "int4, product with weights": partial(product, bits=4),
    **{f"product with {kind} weights": partial(gguf_product, kind) for kind in ("F32", "F16", *KINDS)},
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_error_within_documented_bound(name: str, dtype: torch.dtype) -> None:
    error = KERNELS[name](dtype).max().item()
    print(f"{name}: 2^{torch.tensor(error).log2():.2f}")
    assert STATED[name][dtype] / SLACK < error <= STATED[name][dtype]


def test_error_table_names_every_kernel() -> None:
    assert list(STATED) == list(KERNELS)
