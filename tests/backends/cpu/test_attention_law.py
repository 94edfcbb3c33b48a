"""The bitwise law of attention: a query's bits depend on its own keys alone.

Bits do not depend on the cuts of the sequence into passes, on the rows beside it, on threads, or on the content of
hidden slots. Shape suffixes as in paged.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.fed_text import FedText, check_cuts
from tests.helpers.paged_kv import PAGE, Paged, native

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("dtype")


def at_borders(S: int) -> list[int]:
    """Return cuts beside the borders of pages, blocks and splits."""
    return sorted({0, S, *(x for border in (16, 32, 64, 128, 1024) for x in (border - 1, border, border + 1) if x < S)})


@pytest.mark.parametrize(("S", "G", "h", "D", "view"), [
    (1150, 2, 1, 16, {}), (300, 1, 4, 64, {}), (200, 1, 8, 80, {}), (170, 2, 1, 128, {}), (140, 1, 1, 256, {}),
    (150, 1, 3, 96, {}), (140, 1, 7, 64, {}), (130, 1, 16, 128, {}),
    (1150, 1, 1, 16, {"sinks": 16, "window": 100}), (300, 1, 2, 64, {"sinks": 32, "window": 61}),
])  # fmt: skip
def test_query_bits_depend_on_own_keys_only(
    S: int, G: int, h: int, D: int, view: dict[str, int], dtype: torch.dtype
) -> None:
    text = FedText(S, G, h, D, dtype, **view)
    assert torch.equal(text.fed(at_borders(S), 9), check_cuts(text, mates=[0, 0, 0]))


def test_query_bits_token_by_token_unchanged(dtype: torch.dtype) -> None:
    text = FedText(150, 2, 2, 32, dtype)
    single_pass = text.fed([0, 150], seed=1)
    assert torch.equal(text.fed(list(range(151)), seed=2), single_pass)


def test_query_bits_in_ragged_batch_unchanged(dtype: torch.dtype) -> None:
    text = FedText(1100, 2, 2, 32, dtype)
    native.set_threads(1)
    single_pass = text.fed([0, 1100], seed=1)
    native.set_threads(2)
    assert torch.equal(text.fed([0, 700, 1020, 1036, 1037, 1045, 1099, 1100], seed=2, mates=7), single_pass)


def test_mass_and_threads_keep_attention_bits(dtype: torch.dtype) -> None:
    kv = Paged(2, 64, 200, dtype)
    row = kv.row(3000)
    q_BTHD = kv.normal(1, 9, 8, 64)
    results = []
    for threads in (1, 2, 2):
        native.set_threads(threads)
        attn_out = torch.empty_like(q_BTHD)
        mass = torch.empty(1, 2, len(row.list_P))
        kv.pages.attend(q_BTHD, [2991], [9], row.list_P[None], attn_out, mass)
        results.append((attn_out, mass))
    without_mass = torch.empty_like(q_BTHD)
    kv.pages.attend(q_BTHD, [2991], [9], row.list_P[None], without_mass)
    for attn_out, mass in results:
        assert torch.equal(attn_out, without_mass) and torch.equal(mass, results[0][1])


def test_length_dependent_split_changes_bits(dtype: torch.dtype) -> None:
    """Negative control: two halves of the keys, merged, differ from the kernel's single sum.

    The order of sums matters.
    """
    S = 1024
    D = 64
    kv = Paged(1, D, 80, dtype)
    row = kv.row(S)
    q_BTHD = kv.normal(1, 1, 1, D)
    different = 0
    for length in range(S - 60, S, 4):
        unsplit = torch.empty_like(q_BTHD)
        halves = []
        kv.pages.attend(q_BTHD, [length - 1], [1], row.list_P[None], unsplit)
        middle = length // 2 // PAGE * PAGE  # the cut of a kernel for two threads
        for begin, end in ((0, middle), (middle, length)):
            attn_out = torch.empty_like(q_BTHD)
            kv.pages.attend(q_BTHD, [end - begin - 1], [1], row.list_P[None, begin // PAGE :].contiguous(), attn_out)
            scores_S = (row.k_SGD[begin:end, 0].float() @ q_BTHD[0, 0, 0].float()) / D**0.5
            halves.append((attn_out.float(), scores_S.logsumexp(0)))
        (a, la), (b, lb) = halves
        different += not torch.equal(torch.lerp(b, a, torch.sigmoid(la - lb)).to(dtype), unsplit)
    assert different > 0
