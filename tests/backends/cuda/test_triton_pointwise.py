"""The small kernels against the torch path: choice, noise, norm, gate, page copies. G rows, N columns, P picks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cuda.scene import DEVICE
from tests.helpers.cuda.torch_kernels import carried
from triforce.backends.cuda.triton import kv_tiles, pointwise, rng, topk
from triforce.backends.torch import model
from triforce.backends.torch.noise import Noise

ODD = [-torch.inf, -2.0, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, torch.inf, torch.nan]


def by_sorting(scores_GN: torch.Tensor, candidates: range, picks: int) -> torch.Tensor:
    """Return the picks of a stable descending sort: the lowest ids among equals."""
    some_GN = scores_GN[:, candidates.start : candidates.stop]
    order_GN = torch.sort(some_GN, dim=1, descending=True, stable=True).indices
    return order_GN[:, :picks].sort(1).values + candidates.start


def chosen(scores_GN: torch.Tensor, candidates: range, picks: int) -> torch.Tensor:
    return topk.best(scores_GN.to(DEVICE), candidates, picks).cpu()


def exponentials(*places_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return rng.exponentials(*(x.to(DEVICE) for x in places_B), vocab_size).cpu()


@given(values=st.lists(st.sampled_from(ODD), min_size=1, max_size=40), data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_triton_topk_with_odd_scores_equals_torch(values: list[float], data: st.DataObject) -> None:
    scores_GN = torch.tensor([values, values[::-1]])
    start = data.draw(st.integers(0, len(values)))
    picks = data.draw(st.integers(0, len(values) - start))
    candidates = range(start, len(values))
    assert torch.equal(chosen(scores_GN, candidates, picks), by_sorting(scores_GN, candidates, picks))


def test_triton_topk_of_many_equals_torch() -> None:
    scores_GN = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)) ** 3
    reference = by_sorting(scores_GN, range(16, 650), 100)
    assert torch.equal(chosen(scores_GN, range(16, 650), 100), reference)
    assert not torch.equal(chosen(-scores_GN, range(16, 650), 100), reference)


@pytest.mark.parametrize("vocab_size", [1, 97])
def test_triton_noise_equals_torch(vocab_size: int) -> None:
    seeds = [0, 2**64 - 1, 12345]
    choices = [0, 7, 2**32 - 1]
    positions = [3, 2**31, 2**32 - 1]
    reference = Noise(seeds, choices).exponentials(torch.tensor(positions)[:, None], vocab_size)[:, 0]
    as_int64 = torch.tensor(seeds, dtype=torch.uint64).view(torch.int64)
    got = exponentials(as_int64, torch.tensor(choices), torch.tensor(positions), vocab_size=vocab_size)
    torch.testing.assert_close(got, reference, rtol=1e-15, atol=0)
    strided_positions = torch.tensor(positions)[:, None].expand(3, 2).contiguous()[:, 0]  # as one of several columns
    assert torch.equal(exponentials(as_int64, torch.tensor(choices), strided_positions, vocab_size=vocab_size), got)
    shifted_noise = exponentials(as_int64, torch.tensor(choices), torch.tensor(positions) - 1, vocab_size=vocab_size)
    assert (shifted_noise != reference).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_norm_and_gate_equal_torch(dtype: torch.dtype) -> None:
    """Values are rounded where the torch path rounds.

    They differ by the order of a sum and by the exponential at most.
    """
    draw = torch.Generator().manual_seed(0)
    step = torch.finfo(dtype).eps
    x, weight, up = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((2, 3, 40), (40,), (2, 3, 40)))
    reference = model.norm(x, weight, 1e-5)
    triton_output = pointwise.norm(x.to(DEVICE), weight.to(DEVICE), 1e-5).cpu()
    torch.testing.assert_close(triton_output, reference, rtol=4 * step, atol=0)
    reference = model.swiglu(x.clone(), up)
    triton_output = pointwise.swiglu(x.clone().to(DEVICE), up.to(DEVICE)).cpu()
    torch.testing.assert_close(triton_output, reference, rtol=max(4 * step, FAST_EXPONENTIAL), atol=step / 100)


FAST_EXPONENTIAL = 2**-20
"""Relative error of silu(x) with |x| < 4 on a GPU.

PTX allows ex2.approx 2 ** -22, and a division as much. The exponent is rounded to 2 ** -22 before.
"""


def test_gate_tolerance_has_room_for_fast_exponentials() -> None:
    """The tolerance rejects a gate that is wrong by a thousandth of the exponential."""
    gate = torch.linspace(-4, 4, 4001, dtype=torch.float64)
    exact = gate / (1 + (-gate).exp())
    exponential = (-gate).exp()
    for sign in (-1, 1):
        rounded = (-gate / math.log(2)).float().double() + sign * 2**-23  # to its nearest, and what the product adds
        fast = gate / (1 + torch.exp2(rounded) * (1 + sign * 2**-22)) * (1 - sign * 2**-22)
        assert 4 * torch.finfo(torch.float32).eps < ((fast - exact) / exact).nan_to_num().abs().max() < FAST_EXPONENTIAL
    wrong = gate / (1 + 1.001 * exponential)
    assert ((wrong - exact) / exact).nan_to_num().abs().max() > 100 * FAST_EXPONENTIAL


def test_page_copy_starts_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half a million places nearly all are 0, as a rule: a retrieval pass of 32 layers asks for that many."""
    grids: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(math.prod(grid))
            return lambda *arguments: None

    monkeypatch.setattr(kv_tiles, "interpreted", lambda: False)
    monkeypatch.setattr(kv_tiles, "_carry", Kernel())
    places = torch.zeros(32 * 32 * 512, dtype=torch.int64)
    pages = torch.zeros(1)
    kv_tiles.copy_pages((pages, pages), places, (pages, pages), places, 2048)
    assert grids == [len(places) // 32] and grids[0] < 1 << 15


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU takes such programs anyway")
@pytest.mark.parametrize("size", [16 * 8, 16 * 10])
def test_page_copy_by_small_programs_equals_torch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are as on a GPU: some have only zeros, and the last one is not full."""
    draw = torch.Generator().manual_seed(0)
    source, target = ((torch.randn(40, size, generator=draw), torch.randn(40, size, generator=draw)) for _ in range(2))
    from_X = torch.randperm(40, generator=draw).repeat(3)[:75]
    to_X = torch.zeros(75, dtype=torch.int64)
    to_X[[0, 3, 70, 74]] = torch.tensor([9, 4, 39, 1])
    reference = tuple(x.clone() for x in target)
    carried(source, from_X, reference, to_X, size)
    monkeypatch.setattr(kv_tiles, "interpreted", lambda: False)
    kv_tiles.copy_pages(source, from_X, target, to_X, size)
    assert all(map(torch.equal, target, reference))
