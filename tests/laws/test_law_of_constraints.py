"""Under a constraint a text follows the top tier's law, restricted and renormalised, in every branch.

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
from tests.helpers.laws.enumeration import Law, TierStack, chain_law, distance, law
from tests.helpers.laws.palette import mixed, table
from tests.helpers.samplers import Sampler, each_sampler, torch_sampling
from tests.laws.test_law_seeded import ASSIGNED, HORIZON, SETTINGS, Assigned
from triforce.backends.token_sampler import RestrictedSampling
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints
from triforce.speculation import Seeded, TokenSampler, Verification

torch.set_num_threads(1)
V = 4
TEXT = 6
INSIDE = [(1, 1), (1, 0), (0, 1)]
PALETTE = [(*a, *b) for a, b in product(INSIDE, INSIDE)]
STACK_GAMMAS = {"plain": (), "draft": (2,), "three tiers": (1, 2), "ngram": (2, 2)}
WARPERS = SETTINGS | {
    "a huge bias": SamplingParams(0.5, logit_bias={0: 1e9, 2: -1e9}),
    "a tiny temperature": SamplingParams(5e-324, min_p=0.5),
    "huge penalties": SamplingParams(2.0, top_p=0.9, repetition_penalty=1e9, presence_penalty=-1e9),
}
each_stack = pytest.mark.parametrize("name", STACK_GAMMAS)


def pair(text: Sequence[int]) -> int:
    """Return the pair of the next token."""
    return (sum(text) + text.count(3) * len(text)) % 2


class Pairs:
    """A constraint that allows one pair; `stale` forgets the draft tokens."""

    failure = ""

    def __init__(self, stale: bool) -> None:
        self.stale = stale

    def allowed(self, text_T: Ints, draft_K: Ints) -> Bools:
        text = text_T.tolist()
        draft = draft_K.tolist()
        columns = [pair(text + draft[: 0 if self.stale else j]) for j in range(len(draft) + 1)]
        return np.array([[token // 2 == column for token in range(V)] for column in columns])


def tables(name: str) -> list[torch.Tensor]:
    drawn_tables = [table(PALETTE, 2, seed) for seed in range(1, len(STACK_GAMMAS[name]) + 2 - (name == "ngram"))]
    return [*(mixed(laws, drawn_tables[-1], seed) for seed, laws in enumerate(drawn_tables[:-1], 1)), drawn_tables[-1]]


def stack(name: str, sampler: Sampler, stale: bool = False) -> TierStack:
    def restricted(
        params: Sequence[SamplingParams], prompts: Sequence[int], vocab_size: int, coupling: Verification
    ) -> TokenSampler:
        free = sampler(params, prompts, vocab_size, coupling)
        return RestrictedSampling(free, [Pairs(stale)] * len(params), prompts)

    logits = [laws.log() for laws in tables(name)]
    tiers = list(zip([None] * (name == "ngram") + logits, [*STACK_GAMMAS[name], 1], strict=True))
    return TierStack(tiers, sampler=restricted)


def truth(name: str) -> Law:
    top = tables(name)[-1]

    def next_law(text: tuple[int, ...]) -> list[float]:
        weights = [
            w * (token // 2 == pair(text)) for token, w in enumerate(top[(*TierStack.prompt, *text)[-2:]].tolist())
        ]
        return [w / sum(weights) for w in weights]

    return chain_law(next_law, TEXT)


@each_sampler
@each_stack
def test_rejection_follows_constrained_law(name: str, sampler: Sampler) -> None:
    assert distance(law(stack(name, sampler), TEXT), truth(name)) < EXACT


@pytest.mark.parametrize("name", ["draft", "three tiers"])
def test_forgetful_constraint_is_detected(name: str) -> None:
    """Negative control."""
    assert distance(law(stack(name, torch_sampling, stale=True), TEXT), truth(name)) > 0.01


@each_sampler
@each_stack
@pytest.mark.parametrize("params", WARPERS.values(), ids=WARPERS)
def test_seeded_constrained_texts_equal_plain_decoding(name: str, sampler: Sampler, params: SamplingParams) -> None:
    """No logits processor brings back a forbidden token."""

    def texts(which: TierStack) -> torch.Tensor:
        which = replace(which, coupling=Seeded)
        branches = which.start(HORIZON, len(ASSIGNED))
        noise = Assigned(len(which.prompt), V)
        while branches.live_B.any():
            branches = which.play(branches, noise)
            branches.live_B = branches.lengths_B < len(which.prompt) + HORIZON
        return branches.ids_BS[:, len(which.prompt) :][:, :HORIZON]

    full_stack = replace(stack(name, sampler), params=params)
    plain = texts(replace(full_stack, tiers=full_stack.tiers[-1:]))
    assert torch.equal(texts(full_stack), plain)
    assert all(token // 2 == pair(text[:i]) for text in plain.tolist() for i, token in enumerate(text))
