"""RoPE and writes to pages. Shape suffixes as in paged.py, N tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.paged_kv import PAGE, Paged, native, slots
from triforce.backends.torch.rotation import rotate
from triforce.backends.torch.tensors import tensor_of
from triforce.model.rope import Rope

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")


def turns(positions: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    rope = Rope((10000.0 ** (-torch.arange(0, D, 2) / D)).numpy(), scale=1.1)
    cos, sin = rope.cos_sin(np.arange(positions))
    return tensor_of(cos), tensor_of(sin)


@pytest.mark.parametrize(
    ("N", "H", "G", "D"), [(1, 4, 2, 64), (5, 3, 3, 80), (70, 2, 1, 16), (40, 8, 1, 96), (3, 2, 2, 256)]
)
def test_rope_and_write_equals_float64(N: int, H: int, G: int, D: int, dtype: torch.dtype) -> None:
    """Bits are those of rope.py, rounded once. Only the given slots change, and the scratch page stays unchanged."""
    kv = Paged(G, D, pages=9, dtype=dtype)
    place_N = slots(kv.take(120), 120)[torch.randperm(120, generator=kv.draw)[:N]]
    place_N[1::7] = torch.arange(len(place_N[1::7])) % PAGE  # padding
    q, k, v = (torch.randn(N, heads * D, generator=kv.draw) for heads in (H, G, G))
    table = turns(1000, D)
    near_N = torch.randperm(N) + 900
    far_N = torch.full((N,), 77)
    rotated = torch.empty(N, H, D, dtype=dtype)
    q_sinks = torch.empty(N, H, D, dtype=dtype)
    kv.pages.rope_and_write(q, k, v, *table, near_N, place_N, rotated, far_N, q_sinks)
    table_rows = [tuple(x[None, at_N] for x in table) for at_N in (near_N, far_N)]
    assert torch.equal(rotated, rotate(q.view(1, N, H, D), table_rows[0])[0].to(dtype))
    assert torch.equal(q_sinks, rotate(q.view(1, N, H, D), table_rows[1])[0].to(dtype))
    written_N = place_N >= PAGE
    got_k, got_v = (torch.empty(int(written_N.sum()), G, D, dtype=dtype) for _ in range(2))
    kv.pages.read(place_N[written_N], got_k, got_v)
    assert torch.equal(got_k, rotate(k.view(1, N, G, D), table_rows[0])[0].to(dtype)[written_N])
    assert torch.equal(got_v, v.view(N, G, D).to(dtype)[written_N])
    for memory in (kv.keys, kv.values):
        assert (~memory.isnan()).sum() == got_k.numel() and memory[:, 0].isnan().all()


def test_page_layout_equals_slots(dtype: torch.dtype) -> None:
    """The layout is the one that the kernels agree on."""
    kv = Paged(2, 32, pages=3, dtype=dtype)
    k = kv.normal(PAGE, 2, 32)
    v = kv.normal(PAGE, 2, 32)
    kv.pages.write(torch.arange(PAGE) + 2 * PAGE, k, v)
    pack = 2 if dtype == torch.bfloat16 else 1
    keys = kv.keys[:, 2].view(2, 32 // pack, PAGE, pack).permute(2, 0, 1, 3).flatten(2)
    values = kv.values[:, 2].view(2, PAGE // pack, 32, pack).permute(1, 3, 0, 2).flatten(0, 1)
    assert torch.equal(keys, k) and torch.equal(values, v)


@pytest.mark.parametrize("dim", [16, 80])
def test_runs_of_tokens_are_written_like_single_ones(dim: int, dtype: torch.dtype) -> None:
    """Runs begin and end within pages.

    Single tokens, reversed tokens and padding are included, in more than one job.
    """
    runs = [(16, 3), (21, 40), (64, 16), (100, 1), (102, 2), (3, 2), (160, 70)]
    place_N = torch.cat([torch.arange(begin, begin + count) for begin, count in runs] + [torch.arange(150, 140, -1)])
    kv = Paged(2, dim, pages=16, dtype=dtype)
    single_kv = Paged(2, dim, pages=16, dtype=dtype)
    k_NGD = kv.normal(len(place_N), 2, dim)
    v_NGD = kv.normal(len(place_N), 2, dim)
    kv.pages.write(place_N, k_NGD, v_NGD)
    for n in range(len(place_N)):
        single_kv.pages.write(place_N[n : n + 1], k_NGD[n : n + 1], v_NGD[n : n + 1])
    for run_memory, two in ((kv.keys, single_kv.keys), (kv.values, single_kv.values)):
        assert torch.equal(run_memory.nan_to_num(7.0), two.nan_to_num(7.0))
        assert run_memory.isnan().sum() == run_memory.numel() - 2 * dim * int((place_N >= PAGE).sum())


def test_query_without_second_rotation_is_written(dtype: torch.dtype) -> None:
    kv = Paged(1, 16, pages=1, dtype=dtype)
    q, k, v = torch.ones(2, 16), torch.ones(2, 16), torch.ones(2, 16)
    rotated = torch.empty(2, 1, 16, dtype=dtype)
    kv.pages.rope_and_write(
        q, k, v, torch.ones(1, 8), torch.zeros(1, 8), torch.zeros(2).long(), torch.tensor([16, 0]), rotated
    )
    assert torch.equal(rotated.float(), torch.ones(2, 1, 16))


def test_write_bad_arguments_raise(dtype: torch.dtype) -> None:
    kv = Paged(2, 32, pages=4, dtype=dtype)
    fine = {
        "q": torch.zeros(3, 128), "k": torch.zeros(3, 64), "v": torch.zeros(3, 64), "cos": torch.zeros(3, 16),
        "sin": torch.zeros(3, 16), "positions": torch.arange(3), "slots": torch.tensor([16, 17, 0]),
        "rotated": torch.zeros(3, 4, 32, dtype=dtype),
    }  # fmt: skip
    wrong: list[dict[str, object]] = [
        {"q": torch.zeros(3, 120)}, {"q": torch.zeros(3, 96)}, {"q": torch.zeros(3, 0)}, {"q": torch.zeros(128)},
        {"k": torch.zeros(2, 64)}, {"k": torch.zeros(3, 64).double()}, {"v": torch.zeros(3, 128)},
        {"v": torch.zeros(64, 3).t()}, {"cos": torch.zeros(3, 32)}, {"sin": torch.zeros(1, 16)},
        {"positions": torch.arange(2)}, {"positions": torch.tensor([0, 1, 3])}, {"slots": torch.tensor([16, 17])},
        {"slots": torch.tensor([16, 17, 80])}, {"slots": torch.tensor([16, -1, 0])},
        {"slots": torch.tensor([1, 2, 3]).int()}, {"rotated": torch.zeros(3, 128, dtype=dtype)},
        {"rotated": torch.zeros(3, 4, 32).double()},
        {"q_sinks": torch.zeros(3, 4, 32, dtype=dtype)}, {"q": [1.0]},
    ]  # fmt: skip
    kv.pages.rope_and_write(**fine)
    for change in wrong:
        with pytest.raises(ValueError):
            kv.pages.rope_and_write(**{**fine, **change})
    k = torch.zeros(3, 2, 32, dtype=dtype)
    for method in (kv.pages.read, kv.pages.write):
        for bad in ((torch.tensor([16, 80, 17]), k, k), (torch.tensor([16]), k, k), (torch.arange(3), k, k[:2])):
            with pytest.raises(ValueError):
                method(*bad)
