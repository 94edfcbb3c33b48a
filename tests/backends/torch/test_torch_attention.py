"""The kernels against attention written out for one query, one head and one key at a time, in float64."""

from __future__ import annotations

from math import exp, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.simple_cache import DEVICE
from triforce.backends.torch import attention
from triforce.backends.torch.attention import attend, attend_causal, fold, unfold
from triforce.backends.torch.kv import gather

torch.set_num_threads(1)
SLACK = {torch.float64: 2e-6, torch.float32: 2e-5, torch.bfloat16: 3e-2}  # scores and sums are float32 at best
DTYPES = [torch.float64, torch.float32, torch.bfloat16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]


def operands(T: int, S: int, H: int, G: int, D: int, dtype: torch.dtype, gain: float = 1.0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(T * 1000 + S)
    shapes = ((T, H, D), (G, S, D), (G, S, D))
    q, k, v = (torch.randn(*shape, generator=draw).to(DEVICE, dtype) for shape in shapes)
    return q * gain, k, v


def attention_by_loop(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return mixed values and mass by the book, without matrix products and without a mask."""
    T, H, D = q_THD.shape
    G, S, _ = k_GSD.shape
    q, k, v = (x.double().cpu() for x in (q_THD, k_GSD, v_GSD))
    attn_out = torch.zeros(T, H, D, dtype=torch.float64)
    mass = torch.zeros(G, S, dtype=torch.float64)
    for t in range(T):
        for h in range(H):
            g = h * G // H
            scores = [float((q[t, h] * k[g, s]).sum()) / sqrt(D) for s in range(S - T + t + 1)]
            terms = [exp(score - max(scores)) for score in scores]
            for s, term in enumerate(terms):
                mass[g, s] += term / sum(terms)
                attn_out[t, h] += term / sum(terms) * v[g, s]
    return attn_out, mass


def close(got: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double().cpu(), reference, atol=SLACK[dtype], rtol=SLACK[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 7), (2, 2), (3, 11), (5, 5), (9, 12)])
def test_torch_attention_equals_loop(T: int, S: int, H: int, G: int, dtype: torch.dtype) -> None:
    q, k, v = operands(T, S, H, G, 8, dtype)
    reference, mass = attention_by_loop(q, k, v)
    got, got_mass = attend(q, k, v)
    assert got.dtype == dtype and got_mass.dtype == torch.float32
    close(got, reference, dtype)
    close(got_mass, mass, dtype)
    close(attend_causal(q, k, v), reference, dtype)


@pytest.mark.parametrize("T", range(1, 41))
def test_torch_attention_widths_and_pasts_equal_loop(T: int) -> None:
    """The two kernels share no line, so each checks the other. The slow path has checked the narrow shapes."""
    for past in (0, 1, 37):
        q, k, v = operands(T, T + past, 4, 2, 16, DTYPES[0])
        got, mass_GS = attend(q, k, v)
        close(attend_causal(q, k, v), got.double().cpu(), DTYPES[0])
        torch.testing.assert_close(mass_GS.sum(1), torch.full_like(mass_GS[:, 0], T * 2.0))
        assert (mass_GS >= 0).all()


@given(T=st.integers(1, 5), past=st.integers(0, 9), G=st.integers(1, 3), h=st.integers(1, 3), D=st.sampled_from([2, 6]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_torch_attention_random_shape_equals_loop(T: int, past: int, G: int, h: int, D: int) -> None:
    q, k, v = operands(T, T + past, G * h, G, D, DTYPES[0])
    reference, mass = attention_by_loop(q, k, v)
    got, got_mass = attend(q, k, v)
    close(got, reference, DTYPES[0])
    close(got_mass, mass, DTYPES[0])
    close(attend_causal(q, k, v), reference, DTYPES[0])


@pytest.mark.parametrize("scores", [1, 40, 100, 150])
def test_torch_attention_in_head_groups_equals_loop(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    """Memory holds the scores of one, two or three of four KV heads at a time.

    The first limit is too small for one head.
    """
    monkeypatch.setattr(attention, "SCORES", scores)
    q, k, v = operands(2, 9, 8, 4, 8, DTYPES[0])
    reference, mass = attention_by_loop(q, k, v)
    got, got_mass = attend(q, k, v)
    close(got, reference, DTYPES[0])
    close(got_mass, mass, DTYPES[0])


def test_torch_attention_reads_pool_without_copy() -> None:
    """Keys come as a slice of the pool's pages, so strides are not those of a new tensor."""
    q, k, v = operands(3, 40, 4, 2, 8, DTYPES[0])
    inner = slice(7, 25)
    for kernel in (lambda *x: attend(*x)[0], attend_causal):
        plain = kernel(q, k[:, inner].contiguous(), v[:, inner].contiguous())
        torch.testing.assert_close(kernel(q, k[:, inner], v[:, inner]), plain, atol=1e-6, rtol=1e-6)


def test_torch_attention_leaves_operands_unchanged() -> None:
    q, k, v = operands(3, 9, 4, 2, 8, torch.float32)
    original_operands = [x.clone() for x in (q, k, v)]
    attend(q, k, v)
    attend_causal(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(original_operands, (q, k, v), strict=True))


@pytest.mark.parametrize("gain", [0.0, 1e3, 1e5])
def test_torch_attention_large_scores_stay_finite(gain: float) -> None:
    q, k, v = operands(4, 20, 4, 2, 8, torch.float32, gain=gain)
    got, mass_GS = attend(q, k, v)
    assert got.isfinite().all() and attend_causal(q, k, v).isfinite().all()
    torch.testing.assert_close(mass_GS.sum(1), torch.full_like(mass_GS[:, 0], 4 * 2.0))


@pytest.mark.parametrize(("T", "past"), [(1, 0), (6, 0), (6, 10)])
def test_torch_attention_is_causal(T: int, past: int) -> None:
    q, k, v = operands(T, T + past, 4, 2, 8, torch.float32)
    for t in range(T):
        later_keys = slice(past + t + 1, None)
        changed_k = k.clone()
        changed_v = v.clone()
        changed_k[:, later_keys] = 50.0
        changed_v[:, later_keys] = -50.0
        for kernel in (lambda *x: attend(*x)[0], attend_causal):
            torch.testing.assert_close(kernel(q, changed_k, changed_v)[: t + 1], kernel(q, k, v)[: t + 1])


@pytest.mark.parametrize(("T", "H", "G"), [(1, 4, 2), (5, 6, 3), (3, 4, 4), (2, 4, 1)])
def test_fold_and_unfold_are_inverse(T: int, H: int, G: int) -> None:
    q_THD = torch.randn(T, H, 8)
    folded_GRD = fold(q_THD, G)
    assert folded_GRD.shape == (G, H // G * T, 8)
    for t in range(T):
        for h in range(H):
            g, i = divmod(h, H // G)
            assert torch.equal(folded_GRD[g, i * T + t], q_THD[t, h])
    assert torch.equal(unfold(folded_GRD, T), q_THD)


@pytest.mark.parametrize("N", [0, 1, 5])
def test_gather_takes_rows_per_head(N: int) -> None:
    pages_GSD = torch.randn(3, 20, 4, device=DEVICE)
    slots_GN = torch.stack([torch.randperm(20)[:N] for _ in range(3)]).to(DEVICE)
    for pages in (pages_GSD, torch.randn(2, 3, 20, 4, device=DEVICE)[1]):
        got_GND = gather(pages, slots_GN)
        assert got_GND.shape == (3, N, 4)
        for g in range(3):
            for n, slot in enumerate(slots_GN[g].tolist()):
                assert torch.equal(got_GND[g, n], pages[g, slot])
