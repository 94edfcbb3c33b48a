"""Drafting ahead changes no text: for each noise it is the one that is made without, and so its law is the same."""

import threading
from dataclasses import replace
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

from tests.laws import test_law_seeded as seeded
from tests.laws.ahead import Standing, ahead_error, handed
from tests.laws.cases import BY_NAME, EXACT, Case
from tests.laws.test_law_of_constraints import ladder as restricted
from tests.laws.toy import PLAIN, Memory
from tests.samplers import Sampler, each_sampler, torch_sampling
from triforce.errors import ModelError
from triforce.sampling import Noise
from triforce.speculation import Beside, Block, Draft, Prefix, Rejection, Seeded, Tier

torch.set_num_threads(1)
ROWS, ALONE, HORIZON = 200, 20, 16
NAMES = [
    "two tiers, gamma 1", "two tiers, gamma 3", "three tiers, gamma 1 and 2", "three tiers, gamma 2 and 2",
    "four tiers", "lookup above a draft in three tiers",
]  # fmt: skip
BLIND = [case for case in seeded.LADDERS.values() if not case.selects]
"""Whose draft reads nothing that the exact tier writes."""


def same(name: str, coupling: type = Rejection, sampler: Sampler = torch_sampling, rows: int = ROWS) -> None:
    """Texts, guesses and what became of them are the same, where some drafts were handed over and some were not."""
    ladder = replace(seeded.random_ladder(BY_NAME[name], PLAIN, sampler), coupling=coupling)
    some, handed_over = 0, 0
    for first in range(ALONE if rows == 1 else 1):
        choices = range(first, first + rows)
        with handed() as counts:
            made = Standing(ladder, HORIZON, ahead=True).texts(Noise([5] * rows, choices), rows)
        plain = Standing(ladder, HORIZON, ahead=False).texts(Noise([5] * rows, choices), rows)
        assert torch.equal(made.texts_BT, plain.texts_BT)
        assert made.judged == plain.judged
        assert made.passes > plain.passes
        some, handed_over = some + len(counts) * rows, handed_over + sum(counts)
    assert 5 < handed_over < 0.9 * some


@each_sampler
@pytest.mark.parametrize("coupling", [Rejection, Seeded])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_one_without(name: str, coupling: type, sampler: Sampler) -> None:
    same(name, coupling, sampler)


@pytest.mark.parametrize("name", NAMES)
def test_and_where_guesses_are_judged_as_a_block(name: str) -> None:
    same(name, Block)


def test_and_of_a_row_alone() -> None:
    same("two tiers, gamma 3", rows=1)


def test_and_behind_a_constraint() -> None:
    both = [
        Standing(restricted("three tiers", torch_sampling), HORIZON, ahead).texts(Noise([5] * ROWS, range(ROWS)), ROWS)
        for ahead in (True, False)
    ]
    assert torch.equal(both[0].texts_BT, both[1].texts_BT) and both[0].judged == both[1].judged


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_law_is_that_of_the_top_tier(seed: int) -> None:
    """Of all noise of whole texts, of which no draw that was handed over comes again."""
    assert ahead_error(replace(BY_NAME["two tiers, gamma 1"], seed=seed), 5) < EXACT


@pytest.mark.slow
def test_the_law_of_longer_drafts() -> None:
    assert ahead_error(Case("two tiers, gamma 2", (2,)), 4) < EXACT


@pytest.mark.parametrize("case", BLIND, ids=lambda case: case.name)
def test_seeded_texts_are_those_of_plain_decoding(case: Case) -> None:
    """For every noise of a finite set at every position."""
    ladder = seeded.random_ladder(case, PLAIN)
    noise = seeded.Assigned(len(ladder.prompt), ladder.vocab_size)
    made = Standing(ladder, seeded.HORIZON, ahead=True).texts(noise, len(seeded.ASSIGNED))
    assert torch.equal(made.texts_BT, seeded.plain(ladder))


def trouble(monkeypatch: pytest.MonkeyPatch, error: Exception, ahead: bool) -> None:
    """Passes that are made ahead fail, or the exact tier's that are made meanwhile; drafting takes its time."""
    score = Tier.score

    def broken(tier: Tier, *args: Any) -> Any:
        apart = threading.current_thread() is not threading.main_thread()
        if apart:
            sleep(0.02)
        if apart == ahead and (apart or tier.below):
            raise error
        return score(tier, *args)

    monkeypatch.setattr(Tier, "score", broken)


def started() -> tuple[Tier, Prefix, Any]:
    ladder = replace(seeded.random_ladder(BY_NAME["two tiers, gamma 3"], PLAIN), coupling=Rejection)
    worlds = ladder.start(HORIZON)
    top: Any = ladder.build(worlds)
    top.meanwhile = Beside(lambda: True, Memory)
    sampling = ladder.sampler([PLAIN], [2], ladder.vocab_size, Rejection(Noise([5], [0])))
    return top, Prefix(worlds.ids_BS.numpy(), worlds.lengths_B.numpy()), sampling


def test_a_pass_that_fails_waits_for_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    top, prefix, sampling = started()
    counters = top.below.counters
    trouble(monkeypatch, OSError("no store"), ahead=False)
    with pytest.raises(OSError, match="no store"):
        top.propose(prefix, sampling, np.ones(1, dtype=np.bool_))
    assert top.below.ahead is None and top.below.counters is counters
    assert counters.passes_B.tolist() == [3 + 1 + 3] and counters.proposed_B.tolist() == [0]


def test_what_fails_ahead_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of a text that never comes. What is a fault of the program shows."""
    live_B = np.ones(1, dtype=np.bool_)
    top, prefix, sampling = started()
    plain: Draft = top.propose(prefix, sampling, live_B)
    for error in (ModelError("all -inf"), ZeroDivisionError()):
        with monkeypatch.context() as patch:
            top, prefix, sampling = started()
            trouble(patch, error, ahead=True)
            if isinstance(error, ModelError):
                assert (top.propose(prefix, sampling, live_B).tokens_BK == plain.tokens_BK).all()
                assert top.below.ahead is None
            else:
                with pytest.raises(ZeroDivisionError):
                    top.propose(prefix, sampling, live_B)
