"""The tokens of one verification follow the verifier's law to 1e-10: integrated exactly, after logits processing."""

from functools import cache
from itertools import product
from math import prod

import pytest
import torch

from tests.helpers.laws.cases import EXACT
from tests.helpers.laws.one_verification import (
    Decide,
    NextLaw,
    Text,
    block_in_torch,
    deviation,
    in_torch,
    kept,
    native,
    native_block,
    reaches_of,
    warped,
)
from tests.helpers.samplers import needs_native
from triforce.interface.sampling_params import SamplingParams

torch.set_num_threads(1)
WARPERS = {
    "neutral": SamplingParams(),
    "low temperature": SamplingParams(temperature=0.4),
    "high temperature": SamplingParams(temperature=3.0),
    "greedy": SamplingParams(temperature=0),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.2),
    "frequency": SamplingParams(frequency_penalty=-0.9),
    "logit bias": SamplingParams(logit_bias={0: -1.5, 2: 1.0}),
    "all": SamplingParams(0.8, 3, 0.95, 0.02, 1.2, 0.3, 0.2, {1: 0.5}),
}
DECIDERS = [
    pytest.param(in_torch, id="torch"),
    pytest.param(native, id="native", marks=needs_native),
    pytest.param(block_in_torch, id="block"),
    pytest.param(native_block, id="native-block", marks=needs_native),
]
each_decider = pytest.mark.parametrize("decide", DECIDERS)
COUNTS = {3: (0, 1, 2, 3), 4: (2, 0, 1)}


def laws(params: SamplingParams, V: int, likeness: float = 0.5) -> tuple[NextLaw, NextLaw]:
    return cache(warped(1, params, V, likeness)), cache(warped(2, params, V, likeness))


@each_decider
@pytest.mark.parametrize("V", COUNTS)
@pytest.mark.parametrize("params", WARPERS.values(), ids=WARPERS)
def test_verification_law_is_exact(params: SamplingParams, V: int, decide: Decide) -> None:
    assert deviation(*laws(params, V), COUNTS[V], decide) < EXACT


@each_decider
@pytest.mark.parametrize("params", WARPERS.values(), ids=WARPERS)
def test_verification_law_of_point_mass_is_exact(params: SamplingParams, decide: Decide) -> None:
    p, _ = laws(params, 3)

    def q(text: Text) -> list[float]:
        return [float(v == len(text) % 3) for v in range(3)]

    assert deviation(p, q, (0, 2, 3), decide) < EXACT


@each_decider
@pytest.mark.parametrize("likeness", [0.0, 0.9, 1.0])
def test_verification_law_for_any_likeness_is_exact(likeness: float, decide: Decide) -> None:
    """At likeness 1.0 both laws are equal."""
    assert deviation(*laws(SamplingParams(), 3, likeness), (0, 1, 2), decide) < EXACT


@pytest.mark.parametrize("params", WARPERS.values(), ids=WARPERS)
def test_verification_acceptance_equals_overlap(params: SamplingParams) -> None:
    p, q = laws(params, 4)
    overlap = sum(map(min, p(()), q(())))
    assert all(abs(chances[0] - overlap) < EXACT for chances in kept(p, q, (1, 2)).values())


@pytest.mark.parametrize("params", WARPERS.values(), ids=WARPERS)
def test_block_accepts_more_than_single_tokens(params: SamplingParams) -> None:
    """The numbers equal the proof's: at least j with the mean of min(1, reach_(j-1) p / q)."""
    p, q = laws(params, 3)
    single, joint = (kept(p, q, (1, 2, 3), decide) for decide in (in_torch, block_in_torch))
    for count, chances in joint.items():
        means = [0.0] * count
        for draft_tokens in product(range(3), repeat=count):
            weight = prod(q(draft_tokens[:j])[token] for j, token in enumerate(draft_tokens))
            for j, reach in enumerate(reaches_of(p, q, draft_tokens)[1:] if weight else []):
                means[j] += weight * reach
        assert means == pytest.approx(chances, abs=EXACT)
        assert all(
            block_chance >= single_chance - EXACT
            for block_chance, single_chance in zip(chances, single[count], strict=True)
        )


def test_block_example_equals_paper() -> None:
    """Two coins, two draft tokens (Sun et al. 2024, section 2): 10/9 are accepted one by one, 11/9 as a block."""

    def p(text: Text) -> list[float]:
        return [1 / 3, 2 / 3]

    def q(text: Text) -> list[float]:
        return [2 / 3, 1 / 3]

    for decide, mean in ((in_torch, 10 / 9), (block_in_torch, 11 / 9)):
        assert sum(kept(p, q, (2,), decide)[2]) == pytest.approx(mean, abs=EXACT)
