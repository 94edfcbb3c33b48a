"""One sequence fed to attention in passes, cut anywhere. Shape suffixes as in paged_kv.py."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor

from tests.helpers.paged_kv import PAGE, Paged, native, pad_lists, slots


class FedText:
    """One sequence that is fed in passes into pages full of NaN."""

    def __init__(self, S: int, G: int, h: int, D: int, dtype: torch.dtype, codes: bool = False, **view: int) -> None:
        self.S = S
        self.codes = codes
        self.view = view
        source = Paged(G, D, 1, dtype, seed=S)
        self.q_SHD = source.normal(S, G * h, D)
        self.q_sinks_SHD = source.normal(S, G * h, D)
        self.k_SGD = source.normal(S, G, D)
        self.v_SGD = source.normal(S, G, D)

    def fed(self, cuts: list[int], seed: int, weigh: bool = False, mates: int = 0) -> Tensor:
        """Return the mixed values (S, H, D), fed from cut to cut. mates: number of rows of other lengths."""
        S, G, D = self.k_SGD.shape
        kv = Paged(G, D, 2 * S // PAGE + 3 + 100 * mates, self.q_SHD.dtype, seed, codes=self.codes)
        list_P = kv.take(S)
        mate_rows = [kv.row(37 + 90 * i) for i in range(mates)]
        lists = pad_lists([list_P, *(mate.list_P for mate in mate_rows)])
        place_S = slots(list_P, S)
        parts = []
        for start, stop in pairwise(cuts):
            kv.write(place_S[start:stop], self.k_SGD[start:stop], self.v_SGD[start:stop])
            q_BTHD, q_sinks_BTHD = (
                torch.cat([x[None, start:stop], kv.normal(mates, stop - start, *x.shape[1:])])
                for x in (self.q_SHD, self.q_sinks_SHD)
            )
            counts = [stop - start, *(min(stop - start, len(mate.k_SGD)) for mate in mate_rows)]
            starts = [start, *(len(mate.k_SGD) - n for mate, n in zip(mate_rows, counts[1:], strict=True))]
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


def check_cuts(text: FedText, mates: list[int]) -> Tensor:
    """Check that any cuts, threads and mates give the mixed values (S, H, D) of one pass bit for bit; return them."""
    assert native is not None
    draw = random.Random(text.S)
    native.set_threads(1)
    expected = text.fed([0, text.S], seed=1)
    assert expected.isfinite().all()
    for trial, widths in enumerate(([1, 2, 3, 5, 8, 16], [1, 7, 64, 17, 200], [40, 90, 512])):
        native.set_threads(1 + trial % 2)
        cuts = random_cuts(text.S, widths, draw)
        assert torch.equal(text.fed(cuts, trial, weigh=trial == 0, mates=mates[trial]), expected), cuts
    return expected
