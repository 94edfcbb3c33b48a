"""The law of a stack of tiers is that of its top tier, to 1e-10: counted over every outcome of every draw."""

from dataclasses import replace

import pytest

from tests.helpers.laws.cases import BLOCKS, BY_NAME, CASES, EXACT, Case
from tests.helpers.laws.enumeration import law
from tests.helpers.laws.replay import replay_error
from tests.helpers.samplers import Sampler, each_sampler

PARAMS, BLOCK_PARAMS = (
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow) for case in cases]
    for cases in (CASES, BLOCKS)
)


@each_sampler
@pytest.mark.parametrize("case", PARAMS)
def test_loop_law_equals_full_tier(case: Case, sampler: Sampler) -> None:
    assert case.error(sampler=sampler) < EXACT


@each_sampler
@pytest.mark.parametrize("case", BLOCK_PARAMS)
def test_loop_law_of_blocks_equals_full_tier(case: Case, sampler: Sampler) -> None:
    assert case.error(sampler=sampler) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES + BLOCKS if not case.slow], ids=lambda case: case.name)
def test_loop_law_of_random_tables_equals_full_tier(case: Case) -> None:
    for seed in range(2, 6):
        assert replace(case, seed=seed).error() < EXACT


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_loop_law_with_persistent_noise_equals_full_tier(seed: int) -> None:
    """No later proposal, whose draft depends on the decisions of an earlier one, reuses a draw of that one."""
    assert replay_error(replace(BY_NAME["a draft that looks where the top tier looked"], seed=seed)) < EXACT


def test_noise_cells_integrate_every_decision() -> None:
    """Two or three times as many cells change no law."""
    for case in (BY_NAME["two tiers, gamma 1"], replace(BY_NAME["a block: gamma 2"], horizon=3)):
        for finer in (2, 3):
            cells = [[width / finer for width in widths for _ in range(finer)] for widths in case.stack().cells]
            assert case.error(cells=cells) < EXACT


def test_stop_tokens_inside_drafts_end_texts() -> None:
    """Otherwise the cases with a stop token would show nothing."""
    for case in (case for case in CASES if case.stop):
        texts = law(case.stack(), case.horizon, case.stop)
        assert len({len(text) for text in texts}) > 3
        assert all(not case.stop & set(text[:-1]) for text in texts)
