"""The law of what a ladder makes is that of its top tier, to 1e-10: counted over every outcome of every draw."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.laws.cases import BLOCKS, BY_NAME, CASES, EXACT, Case
from tests.helpers.laws.replay import replay_error
from tests.helpers.laws.toy import law
from tests.helpers.samplers import Sampler, each_sampler

torch.set_num_threads(1)
PARAMS, BLOCK_PARAMS = (
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow) for case in cases]
    for cases in (CASES, BLOCKS)
)


@each_sampler
@pytest.mark.parametrize("case", PARAMS)
def test_the_law_is_that_of_the_top_tier(case: Case, sampler: Sampler) -> None:
    assert case.error(sampler=sampler) < EXACT


@pytest.mark.parametrize("case", BLOCK_PARAMS)
def test_and_where_guesses_are_judged_as_a_block(case: Case) -> None:
    assert case.error() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES + BLOCKS if not case.slow], ids=lambda case: case.name)
def test_with_other_laws(case: Case) -> None:
    for seed in range(2, 6):
        assert replace(case, seed=seed).error() < EXACT


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_noise_that_outlives_a_proposal(seed: int) -> None:
    """No draw of one proposal is used again by a later one whose draft depends on what it decided."""
    assert replay_error(replace(BY_NAME["a draft that looks where the top tier looked"], seed=seed)) < EXACT


def test_cells_integrate_every_decision() -> None:
    """Twice or three times as many cells change nothing."""
    for case in (BY_NAME["two tiers, gamma 1"], replace(BY_NAME["a block: gamma 2"], horizon=3)):
        for finer in (2, 3):
            cells = [[width / finer for width in widths for _ in range(finer)] for widths in case.ladder().cells]
            assert case.error(cells=cells) < EXACT


def test_stop_tokens_end_texts_inside_drafts() -> None:
    """Otherwise the cases with a stop token would show nothing."""
    for case in (case for case in CASES if case.stop):
        texts = law(case.ladder(), case.horizon, case.stop)
        assert len({len(text) for text in texts}) > 3
        assert all(not case.stop & set(text[:-1]) for text in texts)
