"""Negative controls: each fault fails the checks that the laws are proven with, and the code as written passes them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.helpers.laws.cases import BY_NAME, EXACT
from tests.helpers.laws.kv import kv_error, mispicked
from tests.helpers.laws.one_verification import block_in_torch
from tests.helpers.laws.replay import replay_error
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.laws import test_law_seeded as seeded
from tests.laws.test_law_acceptance import LIMIT, watched_stack
from tests.laws.test_law_of_one_verification import deviation, laws
from tests.laws.test_law_of_the_engine import PLAIN, Trial
from triforce.backends import dispatch
from triforce.interface.sampling_params import SamplingParams
from triforce.speculation import Rejection

torch.set_num_threads(1)
SEEDS = (1, 2)


def verifications() -> None:
    assert deviation(*laws(SamplingParams(0.8), 3), (0, 1, 2)) < EXACT


def blocks() -> None:
    assert deviation(*laws(SamplingParams(0.8), 3), (0, 1, 2), block_in_torch) < EXACT


def blocks_of_two() -> None:
    assert replace(BY_NAME["a block: thirds"], horizon=2).error() < EXACT


def loop(name: str) -> Callable[[], None]:
    def check() -> None:
        assert all(replace(BY_NAME[name], seed=seed).error() < EXACT for seed in SEEDS)

    return check


def replayed() -> None:
    looking = BY_NAME["a draft that looks where the top tier looked"]
    assert all(replay_error(replace(looking, seed=seed)) < EXACT for seed in SEEDS)


def accepted() -> None:
    watched = watched_stack(Rejection, [1, 1, 1])
    assert all(abs(watched.excess(tier)) < LIMIT for tier in (1, 2))


def races() -> None:
    for name in ("three tiers, gamma 1 and 2", "ngram"):
        stack = seeded.random_stack(BY_NAME[name], PLAIN)
        assert torch.equal(seeded.speculated(stack), seeded.plain(stack))


def same_text(mode: str) -> Callable[[], None]:
    def check() -> None:
        assert mispicked(mode) == 0

    return check


def same_kv(mode: str) -> Callable[[], None]:
    def check() -> None:
        assert kv_error(mode) < 1e-4

    return check


@pytest.fixture(autouse=True)
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults are edits of Python."""
    monkeypatch.setattr(dispatch, "native", None)


CHECKS: dict[str, Callable[[], None]] = {
    "one verification": verifications,
    "one block": blocks,
    "blocks of two tiers": blocks_of_two,
    "blocks of three tiers": loop("a block: three tiers"),
    "gamma 1": loop("two tiers, gamma 1"),
    "two tiers": loop("two tiers, gamma 3"),
    "three tiers": loop("three tiers, gamma 1 and 2"),
    "ngram": loop("ngram"),
    "ngram above a draft": loop("ngram above a draft"),
    "temperature": loop("high temperature"),
    "acceptance": accepted,
    "noise": replayed,
    "seeded": races,
    "the engine": Trial("triforce", replace(PLAIN, temperature=0.9), 60, 0.11, 60).check,
    **{f"same text: {mode}": same_text(mode) for mode in ("ar", "draft", "retrieval", "triforce")},
    **{f"same KV: {mode}": same_kv(mode) for mode in ("ar", "draft", "retrieval", "triforce")},
}
"""What `Mutant.checks` names."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "the engine")) for name in CHECKS]
)
def test_law_checks_pass_without_mutant(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", caught_in("test_law_mutant_fails_its_checks"), ids=str)
def test_law_mutant_fails_its_checks(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    assert mutant.checks
    for name in mutant.checks:
        with pytest.raises(AssertionError):
            CHECKS[name]()
