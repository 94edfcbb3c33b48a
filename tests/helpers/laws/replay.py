"""Noise that lives as long as a text: keyed by tier and draw count like the engine's, and enumerated for whole texts.

`toy.law` gives each proposal fresh digits, so it cannot see a draw that is used again by a later proposal. Here every
branch keeps its digits. Shape suffixes: B branches, D digits, n draws.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from tests.helpers.laws.cases import Case
from tests.helpers.laws.enumeration import distance
from tests.helpers.laws.markov import Law, columns
from triforce.ragged import Ints

HORIZON = 3


class Keyed:
    """Uniforms at midpoints of halves; `sizes[tier]` digits for the draws of a tier. `draws` as in the real Noise."""

    def __init__(self, sizes: list[int]) -> None:
        self.digits_BD = torch.tensor([*product(range(2), repeat=sum(sizes))])
        self.sizes = sizes
        self.draws = torch.zeros(len(sizes), len(self.digits_BD), dtype=torch.long)

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        at_Bn = columns(self.draws[tier], n).clamp_max(self.sizes[tier] - 1) + sum(self.sizes[:tier])
        self.draws[tier] += torch.from_numpy(used_B)
        return (self.digits_BD.gather(1, at_Bn).double() + 0.5) / 2


def replay_error(case: Case) -> float:
    """Return the distance of the law of HORIZON tokens of a stack of two tiers from the truth."""
    (gamma,) = case.gammas
    sizes = [gamma * HORIZON, (gamma + 1) * HORIZON]  # each proposal emits at least one token
    stack = case.stack()
    assert all(widths == [0.5, 0.5] for widths in stack.cells)
    noise = Keyed(sizes)
    branches = stack.start(HORIZON, len(noise.digits_BD))
    while branches.live_B.any():
        branches = stack.play(branches, noise)
        branches.live_B = branches.lengths_B < len(stack.prompt) + HORIZON
    texts: Law = defaultdict(float)
    new_BT = branches.ids_BS[:, len(stack.prompt) :][:, :HORIZON]
    for text, count in zip(*(x.tolist() for x in new_BT.unique(dim=0, return_counts=True)), strict=True):
        texts[tuple(text)] += count / len(new_BT)
    return distance(texts, replace(case, horizon=HORIZON).truth())
