"""The native attention over int8 KV: against float64 over the rounded values, and the bitwise law.

Shape suffixes as in paged.py; R, a row of int8 KV: D codes and their scale.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.fed_text import FedText, check_cuts
from tests.helpers.paged_kv import PAGE, Paged, attend, by_the_book, native, pad_lists, slots, visible
from triforce.backends.torch.int8_rows import numbers, rounded, rounded_queries
from triforce.backends.torch.rotation import rotate
from triforce.backends.torch.tensors import tensor_of
from triforce.model.rope import Rope

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)

# Beside the known rounding of queries to int8, weights are off by 2^-16 of the largest of their block; bfloat16
# rounds the result.
BOUND = {torch.bfloat16: 2**-8, torch.float32: 2**-12}
MASS = 4e-4


def error(got: Tensor, reference: Tensor, v: Tensor) -> float:
    """Return the error in units of the largest value that is mixed, as a share of the bound."""
    return float((got.double() - reference).abs().max() / v.abs().max()) / BOUND[got.dtype]


@pytest.mark.parametrize(("G", "h"), [(2, 1), (1, 3), (1, 4), (1, 8)])
@pytest.mark.parametrize(("T", "S", "D"), [
    (1, 1, 16), (1, 100, 64), (5, 300, 80), (3, 2050, 64), (16, 1024, 96), (7, 129, 128), (2, 1100, 256), (70, 90, 32),
    (3, 200, 112), (2, 150, 192),
])  # fmt: skip
def test_codes_random_rows_equal_float64(T: int, S: int, D: int, G: int, h: int, dtype: torch.dtype) -> None:
    kv = Paged(G, D, pages=-(-S // PAGE) + 3, dtype=dtype, codes=True)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, G * h, D)
    got = attend(kv, q_BTHD, [S - T], [T], row.list_P[None])
    reference = by_the_book(rounded_queries(q_BTHD[0]), row.k_SGD, row.v_SGD, visible(S - T, T, S))
    assert error(got[0][0], reference[0], row.v_SGD) <= 1
    torch.testing.assert_close(got[1][0].double(), reference[1], atol=MASS, rtol=MASS)


@pytest.mark.parametrize(("start", "T"), [(0, 5), (60, 40), (300, 16), (1300, 120)])
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (16, 30), (32, 256), (16, 2000)])
def test_codes_sinks_and_window_equal_float64(sinks: int, window: int, start: int, T: int, dtype: torch.dtype) -> None:
    """Pages that have left the window are not read: their scales are NaN here."""
    S = start + T
    D = 32
    kv = Paged(1, D, pages=100, dtype=dtype, codes=True)
    row = kv.row(S)
    q_BTHD = kv.normal(1, T, 2, D)
    q_sinks_BTHD = kv.normal(1, T, 2, D)
    hidden = [p for p in range(sinks // PAGE, len(row.list_P)) if (p + 1) * PAGE <= start - window + 1]
    kv.memory[:, row.list_P[hidden].long()] = -1
    for q_sinks in (q_sinks_BTHD, None):
        attn_out, mass = attend(kv, q_BTHD, [start], [T], row.list_P[None], q_sinks=q_sinks, sinks=sinks, window=window)
        visible_TS = visible(start, T, S, sinks, window)
        turned = rounded_queries(q_sinks[0]) if q_sinks is not None else None
        reference = by_the_book(rounded_queries(q_BTHD[0]), row.k_SGD, row.v_SGD, visible_TS, turned, sinks)
        assert error(attn_out[0], reference[0], row.v_SGD) <= 1
        torch.testing.assert_close(mass[0].double(), reference[1], atol=MASS, rtol=MASS)


@pytest.mark.parametrize("seed", range(12))
def test_codes_ragged_random_batches_equal_float64(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    T, G, h, D = (draw.choice(range(*bounds)) for bounds in ((1, 17), (1, 4), (1, 9), (16, 257, 16)))
    starts = [draw.choice([0, 1, 15, 63, 64, 65, 1023, 1024, draw.randrange(400)]) for _ in range(3)]
    counts = [draw.randint(0, T) for _ in starts]
    kv = Paged(G, D, pages=300, dtype=dtype, seed=seed, codes=True)
    rows = [kv.row(start + count) for start, count in zip(starts, counts, strict=True)]
    q_BTHD = kv.normal(3, T, G * h, D, gain=draw.choice([0.0, 1.0, 3.0]))
    attn_out, _ = attend(kv, q_BTHD, starts, counts, pad_lists([row.list_P for row in rows]), weigh=draw.random() < 0.5)
    for b, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        assert not attn_out[b, count:].any()
        if count:
            visible_TS = visible(start, count, start + count)
            reference, _ = by_the_book(rounded_queries(q_BTHD[b, :count]), row.k_SGD, row.v_SGD, visible_TS)
            assert error(attn_out[b, :count], reference, row.v_SGD) <= 3  # queries are larger here, and so are scores


@pytest.mark.parametrize(("S", "G", "h", "D", "view"), [
    (1150, 2, 1, 16, {}), (300, 1, 4, 64, {}), (200, 1, 8, 80, {}), (170, 2, 3, 128, {}), (140, 1, 1, 256, {}),
    (150, 1, 7, 96, {}), (1150, 1, 1, 16, {"sinks": 16, "window": 100}), (300, 1, 2, 64, {"sinks": 32, "window": 61}),
])  # fmt: skip
def test_codes_query_bits_depend_on_own_keys_only(
    S: int, G: int, h: int, D: int, view: dict[str, int], dtype: torch.dtype
) -> None:
    check_cuts(FedText(S, G, h, D, dtype, codes=True, **view), mates=[0, 1, 2])


def test_codes_of_hidden_slots_change_no_bit(dtype: torch.dtype) -> None:
    """Hidden slots may hold any codes, also one that rounding never makes."""
    outputs = []
    for garbage in (-1, -128, 127):
        kv = Paged(2, 80, pages=20, dtype=dtype, codes=True)
        kv.memory.fill_(garbage)
        row = kv.row(203)
        q_BTHD = kv.normal(1, 9, 6, 80)
        outputs.append(attend(kv, q_BTHD, [194], [9], row.list_P[None]))
    for attn_out, mass in outputs[1:]:
        assert torch.equal(attn_out, outputs[0][0]) and torch.equal(mass, outputs[0][1])


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize(
    ("H", "G", "D"), [(4, 2, 64), (3, 3, 80), (2, 1, 96), (2, 2, 112), (4, 1, 128), (2, 1, 192), (8, 1, 256)]
)
def test_written_codes_equal_rounding_by_torch(H: int, G: int, D: int, hadamard: bool, dtype: torch.dtype) -> None:
    """Keys are rounded once, from float32 after all rotations.

    A value that is read and written again keeps its bits.
    """
    N = 40
    kv, again = (Paged(G, D, pages=9, dtype=dtype, codes=True, hadamard=hadamard) for _ in range(2))
    place_N = slots(kv.take(120), 120)[torch.randperm(120, generator=kv.draw)[:N]]
    q, k, v = (torch.randn(N, heads * D, generator=kv.draw) for heads in (H, G, G))
    k[3] = 0
    v[4] = 1e-20 * v[4]
    rope = Rope((10000.0 ** (-torch.arange(0, D, 2) / D)).numpy(), scale=1.1)
    table = [tensor_of(x) for x in rope.cos_sin(np.arange(100))]
    rotated = torch.empty(N, H, D, dtype=dtype)
    kv.pages.rope_and_write(q, k, v, *table, torch.arange(N), place_N, rotated)
    turns = tuple(x[None, :N] for x in table)
    assert torch.equal(rotated, kv.back(rotate(q.view(1, N, H, D), turns)[0]).to(dtype))
    got = [torch.empty(N, G, D + 2, dtype=torch.int8) for _ in range(4)]
    kv.pages.read(place_N, *got[:2])
    assert torch.equal(got[0], rounded(kv.back(rotate(k.view(1, N, G, D), turns)[0])))
    assert torch.equal(got[1], rounded(kv.back(v.view(N, G, D))))
    again.pages.write(place_N, *got[:2])
    again.pages.read(place_N, *got[2:])
    assert all(map(torch.equal, got[:2], got[2:]))
    untouched = torch.full((kv.memory.shape[1] * PAGE,), True)
    untouched[place_N] = False
    assert (kv.memory[:, 0] == -1).all() and untouched.sum() == untouched.numel() - N


@pytest.mark.parametrize("D", [64, 80, 96, 112, 128, 192])
def test_rotated_heads_leave_attention_as_it_was(D: int, dtype: torch.dtype) -> None:
    """Rotated heads give what unrotated heads give through the whole path, but for rounding."""
    N = 100
    visible_TS = visible(0, 100, 100)
    q, k, v = (torch.randn(N, D, generator=torch.Generator().manual_seed(n)) for n in range(3))
    k[:, 3] *= 20  # one channel spoils the scales of the other channels
    unrotated = torch.ones(1, D // 2), torch.zeros(1, D // 2)
    reference, _ = by_the_book(q[:, None], k[:, None], v[:, None], visible_TS)
    errors = []
    for hadamard in (True, False):
        kv = Paged(1, D, pages=9, dtype=dtype, codes=True, hadamard=hadamard)
        list_P = kv.take(N)
        rotated = torch.empty(N, 1, D, dtype=dtype)
        places = torch.zeros(N, dtype=torch.long), slots(list_P, N)
        kv.pages.rope_and_write(q, k, v, *unrotated, *places, rotated)
        attn_out, _ = attend(kv, rotated[None], [0], [N], list_P[None])
        errors.append(float((attn_out[0] - reference).abs().mean()))
    assert errors[0] < 0.05 and errors[0] < errors[1] / 1.5


def test_own_token_is_attended_to_after_rounding(dtype: torch.dtype) -> None:
    """A first token attends to itself alone, as rounded in memory, and not as the pass has computed it."""
    kv = Paged(1, 64, pages=9, dtype=torch.float32, codes=True)
    D = 64
    q, k, v = (torch.randn(1, D, generator=kv.draw) for _ in range(3))
    list_P = kv.take(1)
    rotated = torch.empty(1, 1, D)
    unrotated = (torch.ones(1, D // 2), torch.zeros(1, D // 2))
    kv.pages.rope_and_write(q, k, v, *unrotated, torch.zeros(1, dtype=torch.long), slots(list_P, 1), rotated)
    attn_out, _ = attend(kv, rotated[None], [0], [1], list_P[None])
    rounded_value = kv.back(numbers(rounded(kv.back(v[:, None]))))
    torch.testing.assert_close(attn_out[0, 0, 0], rounded_value[0, 0], rtol=3e-5, atol=3e-5)
    assert (attn_out[0, 0, 0] - v[0]).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["keys", "values"])
def test_number_that_is_not_finite_is_not_hidden_by_rounding(part: str, dtype: torch.dtype) -> None:
    kv = Paged(1, 32, pages=9, dtype=dtype, codes=True)
    list_P, k, v = kv.take(100), kv.normal(100, 1, 32), kv.normal(100, 1, 32)
    (k if part == "keys" else v)[50, 0, 7] = torch.inf
    kv.fill(list_P, k, v)
    attn_out, _ = attend(kv, kv.normal(1, 60, 1, 32), [40], [60], list_P[None])
    assert attn_out[0, :10].isfinite().all() and attn_out[0, 10:].isnan().all()


def test_coded_pages_bad_arguments_raise(dtype: torch.dtype) -> None:
    memory = torch.zeros(2, 5, 32 * 32 + 64, dtype=torch.int8)
    pages = native.Pages(memory, 32, is_bf16=True, hadamard=True)
    for codes, dim in ((memory, 16), (memory, 24), (memory[0], 32), (memory[:, :1], 32), (memory.short(), 32)):
        with pytest.raises(ValueError):
            native.Pages(codes, dim, is_bf16=True, hadamard=True)
    row = torch.zeros(1, 2, 34, dtype=torch.int8)
    pages.write(torch.tensor([16]), row, row)
    for wrong in (row[..., :32].contiguous(), row.bfloat16(), row[:, :1].contiguous()):
        with pytest.raises(ValueError):
            pages.write(torch.tensor([16]), wrong, wrong)
    with pytest.raises(ValueError):
        attend(Paged(1, 32, 9, dtype, codes=True), torch.zeros(1, 1, 1, 32, dtype=dtype), [0], [1],
               torch.ones(1, 1, dtype=torch.int32), window=3, coarse=[0])  # fmt: skip
