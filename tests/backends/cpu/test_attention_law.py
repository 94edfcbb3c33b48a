"""The bitwise law of attention: a query's bits depend on its own keys alone.

Not on how the sequence was cut into passes, not on the rows beside it, not on threads, not on what lies in slots that
it does not see. Shape suffixes as in paged.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, Paged, native, pad_lists, slots, usable

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=usable(), ids=lambda use: f"{use[0]}-{str(use[1])[6:]}")
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    level, threads = native.level(), native.threads()
    native.use(request.param[0])
    yield request.param[1]
    native.use(level)
    native.set_threads(threads)


class Text:
    """One sequence that is fed in passes, into pages that hold NaN before."""

    def __init__(self, S: int, G: int, h: int, D: int, dtype: torch.dtype, **view: int) -> None:
        self.S, self.view = S, view
        source = Paged(G, D, 1, dtype, seed=S)
        self.q_SHD, self.q_sinks_SHD = source.normal(S, G * h, D), source.normal(S, G * h, D)
        self.k_SGD, self.v_SGD = source.normal(S, G, D), source.normal(S, G, D)

    def fed(self, cuts: list[int], seed: int, weigh: bool = False, mates: int = 0) -> Tensor:
        """The mixed values (S, H, D), fed from cut to cut; mates are rows of other lengths."""
        S, G, D = self.k_SGD.shape
        kv = Paged(G, D, 2 * S // PAGE + 3 + 100 * mates, self.q_SHD.dtype, seed)
        list_P, others = kv.take(S), [kv.row(37 + 90 * i) for i in range(mates)]
        lists = pad_lists([list_P, *(other.list_P for other in others)])
        place_S, parts = slots(list_P, S), []
        for start, stop in pairwise(cuts):
            kv.pages.put(place_S[start:stop], self.k_SGD[start:stop], self.v_SGD[start:stop])
            q_BTHD, q_sinks_BTHD = (
                torch.cat([x[None, start:stop], kv.normal(mates, stop - start, *x.shape[1:])])
                for x in (self.q_SHD, self.q_sinks_SHD)
            )
            counts = [stop - start, *(min(stop - start, len(other.k_SGD)) for other in others)]
            starts = [start, *(len(other.k_SGD) - n for other, n in zip(others, counts[1:], strict=True))]
            mixed = torch.empty_like(q_BTHD)
            mass = torch.empty(1 + mates, G, lists.shape[1]) if weigh else None
            kv.pages.attend(q_BTHD, starts, counts, lists, mixed, mass, q_sinks_BTHD, **self.view)
            parts.append(mixed[0])
        return torch.cat(parts)


def random_cuts(S: int, widths: list[int], draw: random.Random) -> list[int]:
    cuts = [0]
    while cuts[-1] < S:
        cuts.append(min(S, cuts[-1] + draw.choice(widths)))
    return cuts


def at_borders(S: int) -> list[int]:
    """Cuts beside the borders of pages, blocks and splits."""
    return sorted({0, S, *(x for border in (16, 32, 64, 128, 1024) for x in (border - 1, border, border + 1) if x < S)})


@pytest.mark.parametrize(("S", "G", "h", "D", "view"), [
    (1150, 2, 1, 16, {}), (300, 1, 4, 64, {}), (200, 1, 8, 80, {}), (170, 2, 1, 128, {}), (140, 1, 1, 256, {}),
    (1150, 1, 1, 16, {"sinks": 16, "window": 100}), (300, 1, 2, 64, {"sinks": 32, "window": 61}),
])  # fmt: skip
def test_law(S: int, G: int, h: int, D: int, view: dict[str, int], dtype: torch.dtype) -> None:
    text, draw = Text(S, G, h, D, dtype, **view), random.Random(S)
    native.set_threads(1)
    whole = text.fed([0, S], seed=1)
    assert whole.isfinite().all()
    for trial, widths in enumerate(([1, 2, 3, 5, 8, 16], [1, 7, 64, 17, 200], [40, 90, 512])):
        native.set_threads(1 + trial % 2)
        cuts = random_cuts(S, widths, draw)
        assert torch.equal(text.fed(cuts, trial, weigh=trial == 0, mates=0), whole), cuts
    assert torch.equal(text.fed(at_borders(S), 9), whole)


def test_one_token_at_a_time(dtype: torch.dtype) -> None:
    text = Text(150, 2, 2, 32, dtype)
    whole = text.fed([0, 150], seed=1)
    assert torch.equal(text.fed(list(range(151)), seed=2), whole)


def test_beside_seven_ragged_rows_on_two_threads(dtype: torch.dtype) -> None:
    text = Text(1100, 2, 2, 32, dtype)
    native.set_threads(1)
    whole = text.fed([0, 1100], seed=1)
    native.set_threads(2)
    assert torch.equal(text.fed([0, 700, 1020, 1036, 1037, 1045, 1099, 1100], seed=2, mates=7), whole)


def test_mass_does_not_change_the_mix_nor_threads_the_mass(dtype: torch.dtype) -> None:
    kv = Paged(2, 64, 200, dtype)
    row, q_BTHD = kv.row(3000), kv.normal(1, 9, 8, 64)
    results = []
    for threads in (1, 2, 2):
        native.set_threads(threads)
        mixed, mass = torch.empty_like(q_BTHD), torch.empty(1, 2, len(row.list_P))
        kv.pages.attend(q_BTHD, [2991], [9], row.list_P[None], mixed, mass)
        results.append((mixed, mass))
    alone = torch.empty_like(q_BTHD)
    kv.pages.attend(q_BTHD, [2991], [9], row.list_P[None], alone)
    for mixed, mass in results:
        assert torch.equal(mixed, alone) and torch.equal(mass, results[0][1])


def test_a_split_that_depends_on_the_length_breaks_it(dtype: torch.dtype) -> None:
    """Control: the law is about the order of sums. Two halves of the keys, merged, differ from the kernel's whole."""
    S, D = 1024, 64
    kv = Paged(1, D, 80, dtype)
    row, q_BTHD = kv.row(S), kv.normal(1, 1, 1, D)
    different = 0
    for length in range(S - 60, S, 4):
        whole, halves = torch.empty_like(q_BTHD), []
        kv.pages.attend(q_BTHD, [length - 1], [1], row.list_P[None], whole)
        middle = length // 2 // PAGE * PAGE  # where a kernel for two threads would cut
        for first, last in ((0, middle), (middle, length)):
            mixed = torch.empty_like(q_BTHD)
            kv.pages.attend(q_BTHD, [last - first - 1], [1], row.list_P[None, first // PAGE :].contiguous(), mixed)
            scores_S = (row.k_SGD[first:last, 0].float() @ q_BTHD[0, 0, 0].float()) / D**0.5
            halves.append((mixed.float(), scores_S.logsumexp(0)))
        (a, la), (b, lb) = halves
        different += not torch.equal(torch.lerp(b, a, torch.sigmoid(la - lb)).to(dtype), whole)
    assert different > 0
