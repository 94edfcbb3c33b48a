"""Attention that searches, compared with attention over the lists that an estimate by the book selects.

Shape suffixes as in paged.py; C pages that are searched, N queries of a KV head, E turned channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, Paged, Row, native, pad_lists
from triforce.backends.torch.tensors import tensor_of

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from triforce.backends.cpu.kv import random_rotation

torch.set_num_threads(1)

Search = tuple[Sequence[int], Sequence[int], Sequence[int]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    default_threads = native.threads()
    yield
    native.set_threads(default_threads)


def paged(dtype: torch.dtype, *lengths: int, G: int = 2, D: int = 32, **options: bool) -> tuple[Paged, list[Row]]:
    kv = Paged(G, D, sum(-(-S // PAGE) for S in lengths) + 1, dtype, turn=random_rotation(D), **options)
    return kv, [kv.row(S) for S in lengths]


def attend(
    kv: Paged, rows: list[Row], q_BTHD: Tensor, starts: list[int], search: Search | None, coarse: Sequence[int] = ()
) -> Tensor:
    attn_out = torch.empty_like(q_BTHD)
    counts = [len(row.k_SGD) - start for row, start in zip(rows, starts, strict=True)]
    lists = pad_lists([row.list_P for row in rows])
    options = {"search": search} if search else {}
    kv.pages.attend(q_BTHD, starts, counts, lists, attn_out, coarse=coarse, **options)
    return attn_out


def estimates(q_NHD: Tensor, k_SGD: Tensor, pages: range, matrix_DE: Tensor) -> Tensor:
    """Return how near each page's best key comes to a query's best key, (C), for the query where it comes nearest."""
    k_SE = k_SGD[pages.start * PAGE : pages.stop * PAGE, 0].double() @ matrix_DE.double()
    q_NE = q_NHD.flatten(0, 1).double() @ matrix_DE.double()
    products_NS = q_NE @ (torch.where(k_SE < 0, -1, 1) * k_SE.abs().mean(1, keepdim=True)).T
    best_NC = products_NS.unflatten(1, (-1, PAGE)).amax(2)
    return (best_NC - best_NC.amax(1, keepdim=True)).amax(0)


def clear_picks(scores_C: Tensor, target_picks: int) -> int:
    """Return a number of picks near `target_picks` behind which the next score is clearly lower."""
    gaps = -scores_C.sort(descending=True).values.diff()
    around = range(max(1, target_picks - 8), min(len(scores_C) - 1, target_picks + 8))
    return max(around, key=lambda picks: float(gaps[picks - 1]))


@pytest.mark.parametrize(("S", "T", "h", "D"), [(900, 1, 1, 64), (700, 3, 2, 32), (500, 9, 1, 80), (400, 2, 4, 256)])
@pytest.mark.parametrize("kind", ["numbers", "codes", "rotated codes"])
def test_search_attends_to_estimated_keys(kind: str, S: int, T: int, h: int, D: int, dtype: torch.dtype) -> None:
    rotated = kind == "rotated codes"  # the signs are the sketch
    kv, (row,) = paged(dtype, S, G=1, D=D, codes=kind != "numbers", hadamard=rotated)
    start = S - T
    begin = 2
    q_1THD = kv.normal(1, T, h, D, gain=4)
    end = start // PAGE - 1
    scores_C = estimates(
        q_1THD[0], row.k_SGD, range(begin, end), torch.eye(D) if rotated else tensor_of(random_rotation(D))
    )
    picks = clear_picks(scores_C, 10)
    selected = scores_C.topk(picks).indices.sort().values + begin
    list_P = torch.cat([row.list_P[:begin], row.list_P[selected], row.list_P[end:]])
    list_output = torch.empty_like(q_1THD)
    kv.pages.attend(q_1THD, [start - (end - begin - picks) * PAGE], [T], list_P[None], list_output)
    for count in (1, 2):
        native.set_threads(count)
        assert torch.equal(attend(kv, [row], q_1THD, [start], ([begin], [end], [picks])), list_output)
    assert not torch.equal(attend(kv, [row], q_1THD, [start], None), list_output)


def test_search_selects_per_kv_head(dtype: torch.dtype) -> None:
    """A head finds a far key with the search, and misses it without."""
    S = 1200
    D = 64
    kv, (row,) = paged(dtype, S, G=2, D=D)
    q_1THD = kv.normal(1, 1, 2, D)
    for g, at in enumerate((333, 612)):
        row.k_SGD[at, g] = q_1THD[0, 0, g] * 4
    kv.fill(row.list_P, row.k_SGD, row.v_SGD)
    everything = attend(kv, [row], q_1THD, [S - 1], None)
    searched = attend(kv, [row], q_1THD, [S - 1], ([1], [70], [1]))
    torch.testing.assert_close(searched, everything, rtol=0.05, atol=0.05)
    hidden = attend(kv, [row], q_1THD, [S - 1], ([1], [70], [0]))
    assert (hidden - everything).abs().max() > 0.5


def test_search_with_full_budget_equals_full_attention(dtype: torch.dtype) -> None:
    """Rows have other lengths. One has no new tokens, and one searches nothing."""
    lengths = [700, 96, 300, 64]
    starts = [693, 96, 297, 60]
    kv, rows = paged(dtype, *lengths)
    q_BTHD = kv.normal(4, 7, 4, kv.D)
    plain = attend(kv, rows, q_BTHD, starts, None)
    assert torch.equal(attend(kv, rows, q_BTHD, starts, ([1, 1, 0, 0], [40, 6, 18, 0], [39, 5, 18, 0])), plain)
    searched = attend(kv, rows, q_BTHD, starts, ([1, 1, 0, 0], [40, 6, 18, 0], [3, 5, 18, 0]))
    assert torch.equal(searched[1:], plain[1:]) and not torch.equal(searched[0], plain[0])


def test_search_shared_pages_found_by_each_row(dtype: torch.dtype) -> None:
    kv, (row,) = paged(dtype, 600)
    q_BTHD = kv.normal(2, 2, 4, kv.D)
    shared_output = attend(kv, [row, row], q_BTHD, [598, 598], ([1, 1], [30, 35], [4, 9]))
    for b, search in enumerate((([1], [30], [4]), ([1], [35], [9]))):
        single_kv, (single_row,) = paged(dtype, 600)
        assert torch.equal(attend(single_kv, [single_row], q_BTHD[b : b + 1], [598], search), shared_output[b : b + 1])


def test_search_sketch_is_read_until_page_changes(dtype: torch.dtype) -> None:
    kv, (row,) = paged(dtype, 600)
    q_1THD = kv.normal(1, 2, 4, kv.D, gain=4)
    search = ([1], [36], [3])
    old_output = attend(kv, [row], q_1THD, [598], search)
    kv.fill(row.list_P[:37], *(x.flip(0) for x in (row.k_SGD[: 37 * PAGE], row.v_SGD[: 37 * PAGE])))
    new_output = attend(kv, [row], q_1THD, [598], search)
    reversed_kv, (reversed_row,) = paged(dtype, 600)
    reversed_kv.fill(reversed_row.list_P[:37], *(x.flip(0) for x in (row.k_SGD[: 37 * PAGE], row.v_SGD[: 37 * PAGE])))
    assert torch.equal(attend(reversed_kv, [reversed_row], q_1THD, [598], search), new_output)
    assert not torch.equal(old_output, new_output)


def test_search_with_int8_copies_equals_lists(dtype: torch.dtype) -> None:
    kv, (row,) = paged(dtype, 600, int8=True)
    q_1THD = kv.normal(1, 2, 4, kv.D)
    full_budget = ([1], [36], [35])
    coarse = attend(kv, [row], q_1THD, [598], full_budget, coarse=[590])
    assert torch.equal(coarse, attend(kv, [row], q_1THD, [598], None, coarse=[590]))
    assert not torch.equal(coarse, attend(kv, [row], q_1THD, [598], full_budget))
    fewer = attend(kv, [row], q_1THD, [598], ([1], [36], [5]), coarse=[590])
    assert fewer.isfinite().all() and not torch.equal(fewer, coarse)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_search_extreme_keys_and_queries_stay_finite(value: float, dtype: torch.dtype) -> None:
    kv, (row,) = paged(dtype, 600)
    row.k_SGD[200], q_1THD = value, kv.normal(1, 2, 4, kv.D)
    kv.fill(row.list_P, row.k_SGD, row.v_SGD)
    q_1THD[0, 0, 0] = value
    attend(kv, [row], q_1THD, [598], ([1], [36], [3]))


def test_search_bad_arguments_raise(dtype: torch.dtype) -> None:
    kv, (row,) = paged(dtype, 600, int8=True)
    q_1THD = kv.normal(1, 2, 4, kv.D)
    for wrong, message in (
        (([1], [38], [3]), "before the new tokens"),
        (([5], [4], [0]), "before the new tokens"),
        (([1], [36], [36]), "picks"),
        (([1], [36], [-1]), "picks"),
        (([1, 1], [36], [3]), "each row"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(kv, [row], q_1THD, [598], wrong)
    with pytest.raises(ValueError, match="committed"):
        attend(kv, [row], q_1THD, [598], ([1], [36], [3]), coarse=[500])
    attn_out, search = torch.empty_like(q_1THD), ([1], [36], [3])
    lists_1GP = row.list_P[None, None].expand(1, 2, -1).contiguous()
    with pytest.raises(ValueError, match="whole rows"):
        kv.pages.attend(q_1THD, [598], [2], lists_1GP, attn_out, search=search)
    with pytest.raises(ValueError, match="window"):
        kv.pages.attend(q_1THD, [598], [2], row.list_P[None], attn_out, window=50, search=search)
    without = Paged(2, kv.D, 40, dtype)
    with pytest.raises(ValueError, match="sketches"):
        attend(without, [without.row(600)], q_1THD, [598], search)


@pytest.mark.parametrize("D", [16, 64, 80, 128])
def test_rotation_is_orthogonal_with_the_numbers_of_torch(D: int) -> None:
    generator = torch.Generator().manual_seed(0)
    from_torch = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
    rotation = tensor_of(random_rotation(D))
    torch.testing.assert_close(rotation, from_torch, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(D), rtol=0, atol=1e-5)
