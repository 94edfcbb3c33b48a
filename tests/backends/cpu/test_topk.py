"""The choice of chunks. Shape suffixes: G KV heads, N chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.paged_kv import native
from triforce.backends.dispatch import top_columns

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)


def chosen(scores_GN: Tensor, start: int, stop: int, picks: int) -> Tensor:
    ids = torch.full((len(scores_GN), picks), -1)
    native.topk(scores_GN, start, stop, ids)
    return ids


def by_sorting(scores_GN: Tensor, start: int, stop: int, picks: int) -> Tensor:
    """Return the picks of a stable descending sort: the lowest ids among equals."""
    order = torch.sort(scores_GN[:, start:stop], dim=1, descending=True, stable=True).indices[:, :picks]
    return order.sort(1).values + start


@pytest.mark.parametrize("N", [1, 7, 300, 8192])
def test_topk_equals_torch(N: int) -> None:
    scores_GN = torch.randn(3, N, generator=torch.Generator().manual_seed(N)) ** 3
    for start, stop in ((0, N), (N // 3, N - N // 5)):
        for picks in {0, 1, (stop - start) // 8, stop - start} - {1 if stop == start else -1}:
            by_torch = top_columns(scores_GN.double(), range(start, stop), picks)  # native code takes no float64
            assert torch.equal(top_columns(scores_GN, range(start, stop), picks), by_torch)


@given(
    values=st.lists(st.sampled_from([-torch.inf, -2.0, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, torch.inf, torch.nan]),
                    min_size=1, max_size=40),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_topk_ties_take_lowest_ids(values: list[float], data: st.DataObject) -> None:
    scores_GN = torch.tensor([values, values[::-1]])
    start = data.draw(st.integers(0, len(values)))
    picks = data.draw(st.integers(0, len(values) - start))
    assert torch.equal(chosen(scores_GN, start, len(values), picks), by_sorting(scores_GN, start, len(values), picks))


def test_topk_bad_arguments_raise() -> None:
    scores, ids = torch.zeros(2, 9), torch.zeros(2, 3, dtype=torch.long)
    native.topk(scores, 0, 9, ids)
    for bad in (
        (scores.double(), 0, 9, ids), (scores[0], 0, 9, ids), (scores, -1, 9, ids), (scores, 0, 10, ids),
        (scores, 5, 4, ids), (scores, 7, 9, ids), (scores, 0, 9, ids[:1]), (scores, 0, 9, ids.int()),
        (scores.t(), 0, 9, ids),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.topk(*bad)
