"""The small kernels against the torch path: choice, noise, norm and gate. G rows, N columns, P picks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cuda.scene import DEVICE
from triforce.backends.cuda.triton import pointwise, rng, topk
from triforce.backends.token_sampler import make_noise
from triforce.backends.torch import model

ODD = [-torch.inf, -2.0, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, torch.inf, torch.nan]


def by_sorting(scores_GN: torch.Tensor, candidates: range, picks: int) -> torch.Tensor:
    """A stable descending sort: the lowest ids among equals."""
    some_GN = scores_GN[:, candidates.start : candidates.stop]
    order_GN = torch.sort(some_GN, dim=1, descending=True, stable=True).indices
    return order_GN[:, :picks].sort(1).values + candidates.start


def chosen(scores_GN: torch.Tensor, candidates: range, picks: int) -> torch.Tensor:
    return topk.best(scores_GN.to(DEVICE), candidates, picks).cpu()


def exponentials(*places_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return rng.exponentials(*(x.to(DEVICE) for x in places_B), vocab_size).cpu()


@given(values=st.lists(st.sampled_from(ODD), min_size=1, max_size=40), data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_best_of_odd_scores(values: list[float], data: st.DataObject) -> None:
    scores_GN = torch.tensor([values, values[::-1]])
    start = data.draw(st.integers(0, len(values)))
    picks = data.draw(st.integers(0, len(values) - start))
    candidates = range(start, len(values))
    assert torch.equal(chosen(scores_GN, candidates, picks), by_sorting(scores_GN, candidates, picks))


def test_the_best_of_many() -> None:
    scores_GN = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)) ** 3
    wanted = by_sorting(scores_GN, range(16, 650), 100)
    assert torch.equal(chosen(scores_GN, range(16, 650), 100), wanted)
    assert not torch.equal(chosen(-scores_GN, range(16, 650), 100), wanted)


@pytest.mark.parametrize("vocab_size", [1, 97])
def test_noise_is_that_of_the_torch_path(vocab_size: int) -> None:
    seeds, choices, positions = [0, 2**64 - 1, 12345], [0, 7, 2**32 - 1], [3, 2**31, 2**32 - 1]
    wanted = make_noise(seeds, choices).exponentials(torch.tensor(positions)[:, None], vocab_size)[:, 0]
    as_int64 = torch.tensor(seeds, dtype=torch.uint64).view(torch.int64)
    got = exponentials(as_int64, torch.tensor(choices), torch.tensor(positions), vocab_size=vocab_size)
    torch.testing.assert_close(got, wanted, rtol=1e-15, atol=0)
    apart = torch.tensor(positions)[:, None].expand(3, 2).contiguous()[:, 0]  # as one of several columns
    assert torch.equal(exponentials(as_int64, torch.tensor(choices), apart, vocab_size=vocab_size), got)
    later = exponentials(as_int64, torch.tensor(choices), torch.tensor(positions) - 1, vocab_size=vocab_size)
    assert (later != wanted).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_gate(dtype: torch.dtype) -> None:
    """Rounded where the torch path rounds, so they differ by the order of a sum, and by the exponential, at most."""
    draw, step = torch.Generator().manual_seed(0), torch.finfo(dtype).eps
    x, weight, up = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((2, 3, 40), (40,), (2, 3, 40)))
    wanted = model.norm(x, weight, 1e-5)
    found = pointwise.norm(x.to(DEVICE), weight.to(DEVICE), 1e-5).cpu()
    torch.testing.assert_close(found, wanted, rtol=4 * step, atol=0)
    wanted = model.swiglu(x.clone(), up)
    found = pointwise.swiglu(x.clone().to(DEVICE), up.to(DEVICE)).cpu()
    torch.testing.assert_close(found, wanted, rtol=4 * step, atol=step / 100)
