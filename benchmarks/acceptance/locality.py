"""Overlap of selections over time, layer by layer. L layers, G KV heads, C chunks."""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.acceptance.measure import Case, Row, about
from benchmarks.acceptance.teacher_forcing import Walk
from triforce.kvcache import PAGE, FullView
from triforce.kvcache.selection import Policy


class Recorder:
    """A policy that selects as another one does, and keeps its last selection."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.observes = policy.observes
        self.latest = policy.latest
        self.picked_LGN = torch.empty(0)

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        self.picked_LGN = self.policy.pick(full, row, chunk, candidates, picks)
        return self.picked_LGN


def locality(walk: Walk, usual: Case) -> list[Row]:
    """Return a row a layer, with values after so many `tokens`; `usual.selection` must be one that observes.

    `overlap`: of the chunks that were selected first, the share still selected. `recovered`: the share of the attention
    that falls on what is in sight, when selected anew at each verification; `recovered_once`: when only at first.
    """
    anew, once = _follow(walk, usual, refresh=1), _follow(walk, usual, refresh=0)
    first_LGC = anew[0][1]
    curves = {
        "overlap": [(chosen & first_LGC).sum((1, 2)) / first_LGC.sum((1, 2)) for _, chosen, _ in anew],
        "recovered": [recovered_L for *_, recovered_L in anew],
        "recovered_once": [recovered_L for *_, recovered_L in once],
    }
    return [
        {**about(walk), "layer": layer, "tokens": [token for token, *_ in anew]}
        | {name: [round(float(values_L[layer]), 4) for values_L in steps] for name, steps in curves.items()}
        for layer in range(len(first_LGC))
    ]


def _follow(walk: Walk, usual: Case, refresh: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return for each verification: tokens since the prompt, chunks picked (L, G, C), attention in sight (L)."""
    recorder = Recorder(usual.how.policy(walk))
    view = walk.lower(lambda: recorder, usual.setting(refresh))
    chunks, steps = ceil(len(walk.work.ids) / usual.chunk), []
    for span, *_ in walk.under(view):
        picked_LGN = recorder.picked_LGN
        chosen_LGC = torch.zeros(*picked_LGN.shape[:2], chunks, dtype=torch.bool, device=picked_LGN.device)
        chosen_LGC.scatter_(2, picked_LGN, True)
        visible_LGC = chosen_LGC.clone()
        visible_LGC[..., : ceil(PAGE / usual.chunk)] = True
        visible_LGC[..., ceil(view.selections[0].window_start / usual.chunk) :] = True
        mass_LGC = _mass(walk.full, usual.chunk, chunks)
        recovered_L = (mass_LGC * visible_LGC).sum((1, 2)) / mass_LGC.sum((1, 2))
        steps.append((span.start - walk.work.prompt, chosen_LGC, recovered_L))
    return steps


def _mass(full: FullView, chunk: int, chunks: int) -> Tensor:
    """Return the attention that the last verification gave each chunk, (L, G, C)."""
    mass_LGU, units = full.observations[0].mass_LGU, chunk // full.grain
    assert mass_LGU is not None, "its views select by what is observed"
    whole_LGU = F.pad(mass_LGU, (0, chunks * units - mass_LGU.shape[2]))
    return whole_LGU.view(*whole_LGU.shape[:2], chunks, units).sum(3)
