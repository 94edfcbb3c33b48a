"""The native attention against float64 by the book: windows, page lists, mass, and refused arguments.

Shape suffixes as in paged.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, Paged, attend, by_the_book, native, pad_lists, visible

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")

# bfloat16 rounds weights and results, each by 2^-8 of itself at most, and by less on average. The rest is float32.
BOUND = {torch.bfloat16: 2**-8 + 2**-9, torch.float32: 2e-6}
MASS = 2e-5


def close(got: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], v: Tensor) -> None:
    """Compare errors in units of the largest value that is mixed."""
    bound = BOUND[got[0].dtype] * float(v.abs().max())
    torch.testing.assert_close(got[0].double(), reference[0], atol=bound, rtol=0)
    torch.testing.assert_close(got[1].double(), reference[1], atol=MASS, rtol=MASS)


@pytest.mark.parametrize(("G", "h"), [(2, 1), (1, 4), (1, 8)])
@pytest.mark.parametrize(("T", "S", "D"), [
    (1, 1, 16), (1, 100, 64), (5, 300, 80), (3, 2050, 64), (16, 1024, 96), (7, 129, 128), (2, 1100, 256), (70, 90, 32)
])  # fmt: skip
def test_attention_random_rows_equal_float64(T: int, S: int, D: int, G: int, h: int, dtype: torch.dtype) -> None:
    kv = Paged(G, D, pages=-(-S // PAGE) + 3, dtype=dtype)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, G * h, D)
    got = attend(kv, q_BTHD, [S - T], [T], row.list_P[None])
    reference = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible(S - T, T, S))
    close((got[0][0], got[1][0]), reference, row.v_SGD)
    torch.testing.assert_close(got[1].sum(2), torch.full((1, G), float(T * h)))


@pytest.mark.parametrize("past", [0, 40, 1000])
def test_prefill_causal_equals_float64(past: int, dtype: torch.dtype) -> None:
    """The prompt has enough queries to take turns over all splits. A prefill asks for no mass."""
    T = 150
    G = 2
    H = 4
    D = 64
    kv = Paged(G, D, pages=80, dtype=dtype)
    row = kv.row(past + T)
    q_BTHD = kv.normal(1, T, H, D)
    attn_out, _ = attend(kv, q_BTHD, [past], [T], row.list_P[None], weigh=False)
    reference, mass = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible(past, T, past + T))
    close((attn_out[0], mass), (reference, mass), row.v_SGD)


def test_attention_ragged_and_padded_rows_equal_float64(dtype: torch.dtype) -> None:
    """Rows of a batch equal the same rows alone. Queries and pages that a row does not have give zeros."""
    starts = [0, 1500, 30, 7, 64]
    counts = [3, 5, 0, 1, 4]
    T = 5
    G = 2
    H = 4
    D = 32
    kv = Paged(G, D, pages=120, dtype=dtype)
    rows = [kv.row(start + count) for start, count in zip(starts, counts, strict=True)]
    q_BTHD = kv.normal(len(rows), T, H, D)
    for b, count in enumerate(counts):
        q_BTHD[b, count:] = torch.nan
    attn_out, mass = attend(kv, q_BTHD, starts, counts, pad_lists([row.list_P for row in rows]))
    for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        assert not attn_out[b, count:].any() and not mass[b, :, -(-(start + count) // PAGE) :].any()
        if count == 0:
            continue
        visible_TS = visible(start, count, start + count)
        reference = by_the_book(q_BTHD[b, :count], row.k_SGD, row.v_SGD, visible_TS)
        close((attn_out[b, :count], mass[b, :, : reference[1].shape[1]]), reference, row.v_SGD)
        single_row = attend(kv, q_BTHD[b : b + 1, :count].contiguous(), [start], [count], row.list_P[None])
        assert torch.equal(single_row[0][0], attn_out[b, :count])
        assert torch.equal(single_row[1][0], mass[b, :, : len(row.list_P)])


def test_page_lists_per_kv_head_equal_float64(dtype: torch.dtype) -> None:
    """A retrieval view lists pages per head, then the recent pages that all heads share, the last partly filled."""
    G = 3
    D = 64
    T = 4
    S = 600
    kv = Paged(G, D, pages=40, dtype=dtype)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, 2 * G, D)
    index_GP = torch.stack([torch.randperm(30, generator=kv.draw)[:9].sort().values for _ in range(G)])
    index_GP = torch.cat([index_GP, torch.arange(35, 38).expand(G, -1)], 1)
    tokens_GS = (index_GP[..., None] * PAGE + torch.arange(PAGE)).flatten(1)[:, : S % PAGE - PAGE]
    n = tokens_GS.shape[1]
    got = attend(kv, q_BTHD, [n - T], [T], row.list_P[index_GP][None].contiguous())
    for g in range(G):
        k, v = (x[tokens_GS[g], g : g + 1] for x in (row.k_SGD, row.v_SGD))
        reference = by_the_book(q_BTHD[0, :, 2 * g : 2 * g + 2], k, v, visible(n - T, T, n))
        close((got[0][0, :, 2 * g : 2 * g + 2], got[1][0, g : g + 1]), reference, row.v_SGD)


def test_pages_shared_by_rows_read_alike(dtype: torch.dtype) -> None:
    kv = Paged(2, 64, pages=20, dtype=dtype)
    row = kv.row(200)
    q_BTHD = kv.normal(3, 2, 4, 64)
    attn_out, _ = attend(kv, q_BTHD, [198, 100, 198], [2, 2, 2], row.list_P.expand(3, -1).contiguous())
    for b in range(3):
        single_row, _ = attend(kv, q_BTHD[b : b + 1], [[198, 100, 198][b]], [2], row.list_P[None])
        assert torch.equal(single_row[0], attn_out[b])


@pytest.mark.parametrize(("start", "T"), [(0, 5), (20, 3), (60, 40), (300, 16), (1300, 120)])
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (0, 37), (16, 30), (32, 256), (16, 2000)])
def test_sinks_and_window_equal_float64(sinks: int, window: int, start: int, T: int, dtype: torch.dtype) -> None:
    """Queries are rotated apart for the sinks. Pages that have left the window are not read."""
    G = 1
    H = 2
    D = 32
    S = start + T
    kv = Paged(G, D, pages=100, dtype=dtype)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, H, D)
    q_sinks_BTHD = kv.normal(1, T, H, D)
    hidden = [p for p in range(sinks // PAGE, len(row.list_P)) if (p + 1) * PAGE <= start - window + 1]
    kv.keys[:, row.list_P[hidden].long()] = torch.nan
    kv.values[:, row.list_P[hidden].long()] = torch.nan
    for q_sinks in (q_sinks_BTHD, None):
        attn_out, mass = attend(kv, q_BTHD, [start], [T], row.list_P[None], q_sinks=q_sinks, sinks=sinks, window=window)
        visible_TS = visible(start, T, S, sinks, window)
        turned = q_sinks[0] if q_sinks is not None else None
        reference = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible_TS, turned, sinks)
        close((attn_out[0], mass[0]), reference, row.v_SGD)


@pytest.mark.parametrize("seed", range(10))
def test_attention_random_shapes_equal_float64(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    T, past, G, h, D = (draw.choice(range(*bounds)) for bounds in ((1, 13), (0, 200), (1, 4), (1, 4), (16, 129, 16)))
    kv = Paged(G, D, pages=-(-(T + past) // PAGE), dtype=dtype, seed=seed)
    row = kv.row(T + past)
    q_BTHD = kv.normal(1, T, G * h, D)
    got = attend(kv, q_BTHD, [past], [T], row.list_P[None])
    reference = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible(past, T, T + past))
    close((got[0][0], got[1][0]), reference, row.v_SGD)


@pytest.mark.parametrize("gain", [0.0, 1e3, 1e15])
def test_large_scores_stay_finite(gain: float, dtype: torch.dtype) -> None:
    kv = Paged(2, 64, pages=10, dtype=dtype)
    row, q_BTHD = kv.row(150), kv.normal(1, 4, 4, 64, gain=gain)
    attn_out, mass = attend(kv, q_BTHD, [146], [4], row.list_P[None])
    assert attn_out.isfinite().all()
    torch.testing.assert_close(mass.sum(2), torch.full((1, 2), 8.0))


def test_attention_bad_arguments_raise(dtype: torch.dtype) -> None:
    kv = Paged(2, 32, pages=10, dtype=dtype)
    row = kv.row(40)
    q = kv.normal(1, 2, 4, 32)
    lists = row.list_P[None]
    attn_out = torch.empty_like(q)
    fine = {"q": q, "starts": [38], "counts": [2], "lists": lists, "out": attn_out}
    other_dtype = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    wrong: list[dict[str, object]] = [
        {"q": q.to(other_dtype)}, {"q": q[0]}, {"q": q[..., :16].contiguous()}, {"q": q.transpose(1, 2)},
        {"q": kv.normal(1, 2, 3, 32)}, {"out": attn_out[:, :1].contiguous()}, {"starts": [47]}, {"starts": [-1]},
        {"starts": [2**40]}, {"starts": [2**63 - 1]}, {"starts": [38, 38]}, {"counts": [3]}, {"counts": [-1]},
        {"counts": []},
        {"lists": lists.long()}, {"lists": lists[0]}, {"lists": lists[:, :2].contiguous()}, {"lists": lists - 100},
        {"lists": lists + 11}, {"lists": lists[None].contiguous()}, {"mass": torch.zeros(1, 2, 2)},
        {"mass": torch.zeros(1, 2, 3, dtype=torch.float64)}, {"sinks": 8}, {"sinks": -16}, {"window": -1},
        {"window": 2**63 - 1},
        {"q_sinks": q[:, :1].contiguous()},
    ]  # fmt: skip
    kv.pages.attend(**fine)
    for change in wrong:
        with pytest.raises(ValueError):
            kv.pages.attend(**{**fine, **change})


def test_pages_bad_arguments_raise(dtype: torch.dtype) -> None:
    memory = torch.zeros(2, 5, PAGE * 32, dtype=dtype)
    for keys, values, dim in (
        (memory, memory, 64), (memory, memory, 24), (memory, memory, 0), (memory, memory[:1], 32),
        (memory, memory.double(), 32), (memory.double(), memory.double(), 32), (memory.half(), memory.half(), 32),
        (memory[:, :1], memory[:, :1], 32), (memory.transpose(0, 1), memory.transpose(0, 1), 32),
        (memory[0], memory[0], 32),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.Pages(keys, values, dim)
