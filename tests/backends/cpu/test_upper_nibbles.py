"""Attention to the upper nibbles of int8 KV, which tiers below the full one read. Shape suffixes as in paged.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.paged_kv import PAGE, Paged, Row, attend, by_the_book, native, slots, visible
from tests.helpers.upper_nibbles import HALF, from_upper
from triforce.backends.torch.int8_rows import rounded

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)


def exact_and_middle_rows(
    S: int, G: int, D: int, coarse: int, dtype: torch.dtype, added: int = HALF
) -> tuple[Paged, Row, Paged]:
    """Return the same row twice: exact, and with the blocks before `coarse` as their upper nibbles have them."""
    nibble_kv, middle_kv = (Paged(G, D, -(-S // PAGE) + 3, dtype, seed=S, codes=True) for _ in range(2))
    row = nibble_kv.row(S)
    k_SGR, v_SGR = (torch.empty(S, G, D + 2, dtype=torch.int8) for _ in range(2))
    nibble_kv.pages.read(slots(row.list_P, S), k_SGR, v_SGR)
    cut = coarse // 64 * 64
    changed = [torch.cat([from_upper(x[:cut], added), x[cut:]]) for x in (k_SGR, v_SGR)]
    middle_kv.pages.write(slots(row.list_P, S), *changed)
    return nibble_kv, row, middle_kv


@pytest.mark.parametrize(("T", "S", "G", "h", "D"), [
    (1, 65, 1, 1, 16), (1, 1300, 2, 1, 64), (3, 500, 1, 3, 80), (8, 300, 1, 4, 96), (2, 200, 2, 2, 112),
    (5, 1100, 1, 8, 128), (1, 150, 1, 7, 192), (40, 400, 1, 1, 256),
])  # fmt: skip
def test_upper_nibbles_equal_codes_in_their_middle(T: int, S: int, G: int, h: int, D: int, dtype: torch.dtype) -> None:
    """Bits are equal, and lower nibbles are not read."""
    nibble_kv, row, middle_kv = exact_and_middle_rows(S, G, D, S - T, dtype)
    q_BTHD = nibble_kv.normal(1, T, G * h, D)
    page = PAGE * D
    scales = 2 * PAGE * 2
    middle_output = attend(middle_kv, q_BTHD, [S - T], [T], row.list_P[None])
    for garbage in (False, True):
        if garbage:
            committed = row.list_P[: (S - T) // 64 * 4].long()
            nibble_kv.memory[:, committed, page + scales :] = 77
        got = attend(nibble_kv, q_BTHD, [S - T], [T], row.list_P[None], coarse=[S - T])
        assert all(map(torch.equal, got, middle_output))


def test_half_a_step_is_nearer_than_none() -> None:
    errors = []
    for added in (HALF, 0):
        exact_kv, row, shifted_kv = exact_and_middle_rows(1000, 1, 64, 999, torch.float32, added)
        q_BTHD = exact_kv.normal(1, 1, 4, 64, gain=2.0)
        reference, _ = by_the_book(q_BTHD[0], row.k_SGD, row.v_SGD, visible(999, 1, 1000))
        attn_out, _ = attend(shifted_kv, q_BTHD, [999], [1], row.list_P[None])
        errors.append(float((attn_out[0] - reference).abs().mean()))
    assert errors[0] < errors[1] / 1.3


def test_upper_nibbles_are_nearest_to_codes() -> None:
    codes = torch.arange(-127, 128, dtype=torch.int8)
    error = (from_upper(torch.cat([codes, torch.zeros(2, dtype=torch.int8)]))[:-2].int() - codes).abs()
    assert error.max() == HALF and error.float().mean() < 4.1


@pytest.fixture
def two_threads() -> Iterator[None]:
    assert native is not None
    default_threads = native.threads()
    native.set_threads(2)
    yield
    native.set_threads(default_threads)


@pytest.mark.usefixtures("two_threads")
def test_tokens_written_by_several_threads_keep_their_nibbles() -> None:
    """Tokens of a page share bytes, and lie anywhere in a pass."""
    N = 600
    D = 64
    kv = Paged(2, D, N // PAGE + 2, torch.float32, codes=True, hadamard=False)
    place_N = slots(kv.take(N), N)[torch.randperm(N, generator=kv.draw)]
    q, k, v = (torch.randn(N, 2 * D, generator=kv.draw) for _ in range(3))
    unrotated = torch.ones(1, D // 2), torch.zeros(1, D // 2)
    kv.pages.rope_and_write(q, k, v, *unrotated, torch.zeros(N, dtype=torch.long), place_N, torch.empty(N, 2, D))
    got = [torch.empty(N, 2, D + 2, dtype=torch.int8) for _ in range(2)]
    kv.pages.read(place_N, *got)
    rounded_kv = [rounded(x.view(N, 2, D)) for x in (k, v)]
    assert all(map(torch.equal, got, rounded_kv))
    kv.memory[:, 1:] = -1
    kv.pages.write(place_N, *rounded_kv)
    kv.pages.read(place_N, *got)
    assert all(map(torch.equal, got, rounded_kv))
