"""Int8 weights and int8 copies of pages, on every level.

Products have the bits of the same products in torch. Errors of int8 against float64 are in test_kernel_errors.py.
Shape suffixes as in paged.py; N rows, K inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, Paged, Row, by_the_book, native, slots, visible

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)

SHAPES = [(1, 1), (16, 2), (17, 33), (40, 100), (1000, 48), (72, 2600)]
BLOCK = 64
"""Number of keys that are read from copies together, or not at all."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    default_threads = native.threads()
    yield
    native.set_threads(default_threads)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row as integers, and its scale."""
    scale_N1 = x_NK.float().abs().amax(1, keepdim=True) / 127
    return (x_NK.float() * torch.where(scale_N1 > 0, 1 / scale_N1, 0)).round(), scale_N1


def linear(w_MK: Tensor, x_NK: Tensor) -> Tensor:
    y_NM = torch.full((len(x_NK), len(w_MK)), torch.nan)
    native.Matrix(w_MK, bits=8).linear(x_NK.contiguous(), y_NM)
    return y_NM


@pytest.mark.parametrize(("M", "K"), SHAPES)
def test_int8_product_equals_integer_product(M: int, K: int, dtype: torch.dtype) -> None:
    w_MK = normal(M, K).to(dtype)
    x_NK = normal(25, K, seed=1).to(dtype)
    w_MK[M // 2] = 0
    x_NK[3] = 0
    w, of_output = rounded(w_MK)
    x, of_row = rounded(x_NK)
    integer_product = (x.double() @ w.double().T).float() * (of_output.T * of_row)
    assert torch.equal(linear(w_MK, x_NK), integer_product)


def test_int8_largest_sums_do_not_overflow(dtype: torch.dtype) -> None:
    """No partial sum overflows or saturates, for any signs of codes that are all 127 or -127."""
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]).repeat(1, 1 << 16)
    x_NK = signs.to(dtype)
    w_MK = signs.repeat(6, 1).to(dtype)
    assert torch.allclose(linear(w_MK, x_NK), signs @ signs.repeat(6, 1).T, rtol=1e-5, atol=1e-2)
    with pytest.raises(ValueError, match="too wide"):
        native.Matrix(torch.ones(1, (1 << 17) + 1, dtype=dtype), bits=8)


def test_int8_row_bits_independent_of_batch(dtype: torch.dtype) -> None:
    w_MK = normal(200, 1500).to(dtype)
    x_NK = normal(230, 1500, seed=1).to(dtype)
    batch_output = linear(w_MK, x_NK)
    for count in (1, 2):
        native.set_threads(count)
        for N in (1, 2, 3, 5, 7, 19, 97):
            assert torch.equal(batch_output[N : 2 * N], linear(w_MK, x_NK[N : 2 * N])), N


def test_int8_embedding_rows_are_dequantised(dtype: torch.dtype) -> None:
    w_MK, out = normal(40, 33).to(dtype), torch.empty(3, 33)
    native.Matrix(w_MK, bits=8).rows(torch.tensor([39, 0, 17]), out)
    integers, scale = rounded(w_MK)
    assert torch.equal(out, (integers * scale)[[39, 0, 17]])


def test_int8_nonfinite_inputs_stay_nonfinite(dtype: torch.dtype) -> None:
    for value in (torch.nan, torch.inf):
        x_NK = torch.zeros(2, 40, dtype=dtype)
        x_NK[0, 3] = value
        y = linear(torch.eye(40).to(dtype), x_NK)
        assert not y[0].isfinite().any() and torch.equal(y[1], torch.zeros(40))


def paged(dtype: torch.dtype, S: int, G: int = 2, D: int = 32) -> tuple[Paged, Row]:
    kv = Paged(G, D, S // PAGE + 8, dtype, int8=True)
    return kv, kv.row(S)


def attend(kv: Paged, row: Row, q_BTHD: Tensor, start: int, coarse: Sequence[int]) -> Tensor:
    attn_out = torch.empty_like(q_BTHD)
    kv.pages.attend(q_BTHD, [start], [q_BTHD.shape[1]], row.list_P[None], attn_out, coarse=coarse)
    return attn_out


@pytest.mark.parametrize(("S", "h", "D"), [(1400, 1, 32), (300, 4, 64), (230, 2, 80), (200, 1, 256)])
def test_int8_query_bits_depend_on_own_keys_only(S: int, h: int, D: int, dtype: torch.dtype) -> None:
    kv, row = paged(dtype, S, G=2, D=D)
    start = S - 100
    q_BTHD = kv.normal(1, S - start, 2 * h, D)
    single_pass = attend(kv, row, q_BTHD, start, [start])
    assert single_pass.isfinite().all() and not torch.equal(single_pass, attend(kv, row, q_BTHD, start, []))
    for count, widths in enumerate(([1] * 100, [3, 7, 16, 1, 9, 64], [99, 1])):
        native.set_threads(1 + count % 2)
        parts = []
        at = 0
        for width in widths:
            part_BTHD = q_BTHD[:, at : at + width].contiguous()
            parts.append(attend(kv, row, part_BTHD, start + at, [start]))
            at += width
        assert torch.equal(torch.cat(parts, 1), single_pass)


def test_int8_largest_codes_of_copies_do_not_saturate(dtype: torch.dtype) -> None:
    """Queries, keys and values have codes of 127 and -127 only, and so have the weights of the keys that count."""
    S = 200
    start = 192
    D = 64
    kv, row = paged(dtype, S, G=1, D=D)
    signs_4D = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [-1, -1, -1, -1], [1, 1, -1, -1]]).repeat(1, D // 4)
    k_SGD = signs_4D[torch.arange(S) // 8 % 4][:, None].to(dtype)
    v_SGD = signs_4D[[1]].expand(S, D)[:, None].to(dtype)
    kv.fill(row.list_P, k_SGD, v_SGD.contiguous())
    q_BTHD = signs_4D[:, None].to(dtype)[None]
    attn_out = attend(kv, row, q_BTHD, start, [start])
    reference, _ = by_the_book(q_BTHD[0], k_SGD, v_SGD, visible(start, 4, S))
    assert torch.allclose(attn_out[0].double(), reference, atol=0.02)
    assert torch.allclose(attn_out, attend(kv, row, q_BTHD, start, []), atol=0.02)


@pytest.mark.parametrize("coarse", [0, 1, BLOCK - 1])
def test_int8_partial_block_read_unquantised(coarse: int, dtype: torch.dtype) -> None:
    kv, row = paged(dtype, 200)
    q_BTHD = kv.normal(1, 3, 4, kv.D)
    assert torch.equal(attend(kv, row, q_BTHD, 197, [coarse]), attend(kv, row, q_BTHD, 197, []))


def test_int8_copy_is_read_until_page_changes(dtype: torch.dtype) -> None:
    S = 210
    start = 200
    kv, row = paged(dtype, S)
    q_BTHD = kv.normal(1, S - start, 4, kv.D)
    copy_output = attend(kv, row, q_BTHD, start, [start])
    copied = row.list_P[: start // BLOCK * BLOCK // PAGE].long()
    kv.keys[:, copied] = torch.nan
    kv.values[:, copied] = torch.nan
    assert torch.equal(attend(kv, row, q_BTHD, start, [start]), copy_output)
    kv.fill(row.list_P, row.k_SGD, row.v_SGD)
    assert torch.equal(attend(kv, row, q_BTHD, start, [start]), copy_output)


@pytest.mark.parametrize("cut", [40, 64, 130])
def test_int8_copy_after_rewind_is_not_read(cut: int, dtype: torch.dtype) -> None:
    """Pages that are put, and tokens that are written, read as those of a new memory."""
    S = 210
    start = 200
    results = []
    for first_another_text in (True, False):
        for writes in (True, False):
            kv, row = paged(dtype, S)
            q_BTHD = kv.normal(1, S - start, 4, kv.D)
            if first_another_text:
                attend(kv, row, q_BTHD, start, [start])
            place_N = slots(row.list_P, S)[cut:]
            k, v = (normal(S - cut, kv.G * kv.D, seed=seed) for seed in (5, 6))
            if writes:
                cos = torch.ones(1, kv.D // 2)
                sin = torch.zeros(1, kv.D // 2)
                turned = torch.empty(S - cut, kv.G, kv.D, dtype=dtype)
                kv.pages.rope_and_write(k, k, v, cos, sin, torch.zeros(S - cut, dtype=torch.long), place_N, turned)
            else:
                kv.pages.write(place_N, *(x.view(-1, kv.G, kv.D).to(dtype) for x in (k, v)))
            results.append(attend(kv, row, q_BTHD, start, [start]))
    assert all(torch.equal(result, results[0]) for result in results)
    kv, row = paged(dtype, S)
    assert not torch.equal(attend(kv, row, q_BTHD, start, [start]), results[0])


def test_int8_copies_bad_arguments_raise(dtype: torch.dtype) -> None:
    kv, row = paged(dtype, 200)
    q_BTHD, attn_out = kv.normal(1, 3, 4, kv.D), torch.empty(1, 3, 4, kv.D, dtype=dtype)
    for coarse in ([198], [-1], [64, 64]):
        with pytest.raises(ValueError, match="coarse"):
            attend(kv, row, q_BTHD, 197, coarse)
    with pytest.raises(ValueError, match="window"):
        kv.pages.attend(q_BTHD, [197], [3], row.list_P[None], attn_out, window=50, coarse=[64])
    without = Paged(2, kv.D, 20, dtype)
    with pytest.raises(ValueError, match="copies"):
        attend(without, without.row(200), q_BTHD, 197, [64])
    copies = [torch.empty(kv.keys.shape, dtype=torch.int8) for _ in range(2)]
    for wrong in (
        [copies[0], copies[1], torch.empty(kv.keys.shape[:2])],
        [copies[0], copies[1].short(), torch.empty(*kv.keys.shape[:2], 2)],
        [copies[0][:, 1:].contiguous(), copies[1], torch.empty(*kv.keys.shape[:2], 2)],
    ):
        with pytest.raises(ValueError, match=r"int8|scales"):
            native.Pages(kv.keys, kv.values, kv.D, None, None, *wrong)
