"""Ladders that stay from proposal to proposal, as in a batch, and whose lowest tier may draft ahead in each pass.

Shape suffixes: B worlds, T new tokens, D digits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.laws.cases import Case
from tests.laws.replay import Keyed
from tests.laws.toy import Ladder, Law, Memory, distance
from triforce.ladder import tiers
from triforce.shapes import Bools
from triforce.speculation import Beside, Draft, Prefix, Sampling, Tier, ahead
from triforce.speculation.ahead import Ahead


class Made(NamedTuple):
    """The first tokens of each text; of each tier, and each text, the tokens proposed and those kept; and the passes
    of the lowest tier."""

    texts_BT: Tensor
    judged: list[tuple[list[int], list[int]]]
    passes: int


@dataclass(frozen=True)
class Standing:
    """A ladder that makes texts of at least `horizon` tokens; where they end is no concern of the tiers."""

    ladder: Ladder
    horizon: int
    ahead: bool

    def texts(self, noise: object, rows: int) -> Made:
        ladder = self.ladder
        worlds = ladder.start(self.horizon, rows)
        top = ladder.build(worlds)
        if self.ahead:
            top.meanwhile = Beside(lambda: True, Memory)
        prompt, coupling = len(ladder.prompt), ladder.coupling(noise)
        sampling = ladder.sampler([ladder.params] * rows, [prompt] * rows, ladder.vocab_size, coupling)
        prefix = Prefix(worlds.ids_BS.numpy(), worlds.lengths_B.numpy())
        while (live_B := prefix.lengths_B < prompt + self.horizon).any():
            prefix = prefix.append(top.propose(prefix, sampling, live_B))
        below = tiers(top)[:-1]
        judged = [(tier.counters.proposed_B.tolist(), tier.counters.accepted_B.tolist()) for tier in below]
        texts_BT = torch.from_numpy(prefix.ids_BS[:, prompt:][:, : self.horizon].copy())
        return Made(texts_BT, judged, int(below[0].counters.passes_B.sum()) if below else 0)


def ahead_error(case: Case, horizon: int) -> float:
    """How far the law of texts is from the truth where the draft of a ladder of two tiers goes on in every pass.

    Every world keeps its digits for a whole text, so that none that was drawn ahead may be used again.
    """
    (gamma,) = case.gammas
    ladder = case.ladder()
    assert all(widths == [0.5, 0.5] for widths in ladder.cells)
    noise = Keyed([gamma * horizon, (gamma + 1) * horizon])
    made = Standing(ladder, horizon, ahead=True).texts(noise, len(noise.digits_BD))
    texts: Law = defaultdict(float)
    for text, count in zip(*(x.tolist() for x in made.texts_BT.unique(dim=0, return_counts=True)), strict=True):
        texts[tuple(text)] += count / len(made.texts_BT)
    return distance(texts, replace(case, horizon=horizon).truth())


@contextmanager
def handed() -> Iterator[list[int]]:
    """How many drafts were handed over, each time that one might have been, where guesses are refused, too."""
    counts: list[int] = []
    plain = Ahead.handed

    def watched(made: Ahead, tier: Tier, prefix: Prefix, sampling: Sampling, live_B: Bools) -> Draft:
        draft = plain(made, tier, prefix, sampling, live_B)
        counts.append(int((draft.counts_B > 0).sum()))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "handed", watched)
        patch.setattr(ahead, "PATIENCE", math.inf)
        yield counts
