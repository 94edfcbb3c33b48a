"""Behind a constraint a text follows the top tier's law, restricted and renormalised, in every way it can go.

Tokens 0 and 1 are one pair, 2 and 3 the other; the constraint allows one pair or the other, depending on all of the
text. The models' laws are halves or ones inside each pair, so that two cells integrate every decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from tests.helpers.laws.cases import EXACT
from tests.helpers.laws.palette import mixed, table
from tests.helpers.laws.toy import Ladder, Law, chain_law, distance, law
from tests.helpers.samplers import Sampler, each_sampler, torch_sampling
from tests.laws.test_law_seeded import ASSIGNED, HORIZON, SETTINGS, Assigned
from triforce.backends.token_sampler import RestrictedSampling
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints
from triforce.speculation import Seeded, TokenSampler, Verification

torch.set_num_threads(1)
V, TEXT = 4, 6
INSIDE = [(1, 1), (1, 0), (0, 1)]
PALETTE = [(*a, *b) for a, b in product(INSIDE, INSIDE)]
LADDERS = {"plain": (), "draft": (2,), "three tiers": (1, 2), "ngram": (2, 2)}
WARPERS = SETTINGS | {
    "a huge bias": SamplingParams(0.5, logit_bias={0: 1e9, 2: -1e9}),
    "a tiny temperature": SamplingParams(5e-324, min_p=0.5),
    "huge penalties": SamplingParams(2.0, top_p=0.9, repetition_penalty=1e9, presence_penalty=-1e9),
}
each_ladder = pytest.mark.parametrize("name", LADDERS)


def pair(text: Sequence[int]) -> int:
    """Which pair the next token is of."""
    return (sum(text) + text.count(3) * len(text)) % 2


class Pairs:
    """A constraint that allows one pair; `stale` forgets the guesses."""

    failure = ""

    def __init__(self, stale: bool) -> None:
        self.stale = stale

    def allowed(self, text_T: Ints, guesses_K: Ints) -> Bools:
        text, guesses = text_T.tolist(), guesses_K.tolist()
        columns = [pair(text + guesses[: 0 if self.stale else j]) for j in range(len(guesses) + 1)]
        return np.array([[token // 2 == column for token in range(V)] for column in columns])


def tables(name: str) -> list[torch.Tensor]:
    own = [table(PALETTE, 2, seed) for seed in range(1, len(LADDERS[name]) + 2 - (name == "ngram"))]
    return [*(mixed(laws, own[-1], seed) for seed, laws in enumerate(own[:-1], 1)), own[-1]]


def ladder(name: str, sampler: Sampler, stale: bool = False) -> Ladder:
    def restricted(
        params: Sequence[SamplingParams], prompts: Sequence[int], vocab_size: int, coupling: Verification
    ) -> TokenSampler:
        free = sampler(params, prompts, vocab_size, coupling)
        return RestrictedSampling(free, [Pairs(stale)] * len(params), prompts)

    logits = [laws.log() for laws in tables(name)]
    tiers = list(zip([None] * (name == "ngram") + logits, [*LADDERS[name], 1], strict=True))
    return Ladder(tiers, sampler=restricted)


def truth(name: str) -> Law:
    top = tables(name)[-1]

    def next_law(text: tuple[int, ...]) -> list[float]:
        weights = [w * (token // 2 == pair(text)) for token, w in enumerate(top[(*Ladder.prompt, *text)[-2:]].tolist())]
        return [w / sum(weights) for w in weights]

    return chain_law(next_law, TEXT)


@each_sampler
@each_ladder
def test_rejection_follows_the_restricted_law(name: str, sampler: Sampler) -> None:
    assert distance(law(ladder(name, sampler), TEXT), truth(name)) < EXACT


@pytest.mark.parametrize("name", ["draft", "three tiers"])
def test_a_constraint_that_forgets_the_guesses_is_seen(name: str) -> None:
    """Negative control."""
    assert distance(law(ladder(name, torch_sampling, stale=True), TEXT), truth(name)) > 0.01


@each_sampler
@each_ladder
@pytest.mark.parametrize("params", WARPERS.values(), ids=WARPERS)
def test_seeded_texts_are_those_of_plain_decoding(name: str, sampler: Sampler, params: SamplingParams) -> None:
    """And no warper brings back a token."""

    def texts(which: Ladder) -> torch.Tensor:
        which = replace(which, coupling=Seeded)
        worlds, noise = which.start(HORIZON, len(ASSIGNED)), Assigned(len(which.prompt), V)
        while worlds.live_B.any():
            worlds = which.play(worlds, noise)
            worlds.live_B = worlds.lengths_B < len(which.prompt) + HORIZON
        return worlds.ids_BS[:, len(which.prompt) :][:, :HORIZON]

    whole = replace(ladder(name, sampler), params=params)
    plain = texts(replace(whole, tiers=whole.tiers[-1:]))
    assert torch.equal(texts(whole), plain)
    assert all(token // 2 == pair(text[:i]) for text in plain.tolist() for i, token in enumerate(text))
