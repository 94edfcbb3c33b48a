"""Rows leave a batch one by one and come back: the verdicts of all their proposals are learnt once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.controlled_batch import DEEP, PARAMS, controlled, replan_always
from tests.helpers.simulated_tiers import force
from triforce.engine.sequence_batch import SequenceBatch
from triforce.planner import Plan, PlanController
from triforce.planner.controller import NO_PENDING
from triforce.planner.cost_model import AcceptanceTracker
from triforce.planner.forecast import Beliefs, Choice
from triforce.ragged import ints
from triforce.speculation.draft import Counters

BOTH = Plan(("ngram", "draft", "retrieval", "full"), (4, 2, 6))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the accepted tokens that are learnt, by tier."""
    accepted_by_tier = Counter[str]()
    add = AcceptanceTracker.add

    def counted(self: AcceptanceTracker, tier: str, length: int, accepted: float, *arguments: float) -> None:
        accepted_by_tier[tier] += int(accepted)
        add(self, tier, length, accepted, *arguments)

    monkeypatch.setattr(AcceptanceTracker, "add", counted)
    return accepted_by_tier


@pytest.fixture(params=[DEEP, BOTH], ids=str)
def batch(
    request: pytest.FixtureRequest, learnt: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SequenceBatch]:
    """Yield a batch of four rows that always follow one plan."""
    monkeypatch.setattr(PlanController, "choose", lambda *how: Choice(request.param))
    replan_always(monkeypatch)
    controlled_batch = controlled(rows=4)
    for _ in range(4):
        controlled_batch.catch_up()
        controlled_batch.step()
    yield controlled_batch
    controlled_batch.keep([])


def accepted(batch: SequenceBatch, rows: list[int]) -> Counter[str]:
    """Return accepted tokens of these rows by lower tier."""
    return Counter({tier.name: int(tier.counters.accepted_B[rows].sum()) for tier in batch.tiers[:-1]})


def test_verdicts_on_rows_that_leave_one_by_one_are_learnt(batch: SequenceBatch, learnt: Counter[str]) -> None:
    expected = accepted(batch, [1, 3])
    batch.keep([0, 2, 3])
    batch.keep([0, 1])
    batch.step()
    expected += accepted(batch, [0, 1])
    batch.keep([1])
    assert batch.controller
    batch.controller.close(batch.prefix)
    assert +learnt == +expected and sum(expected.values()) > 0


def test_verdicts_on_row_that_comes_again_are_learnt_once(batch: SequenceBatch) -> None:
    for tier in batch.tiers:
        counters = Counters(1)
        counters.swap_in(0, tier.counters.swap_out(1))
        assert counters.accepted_B == tier.counters.accepted_B[1] and not counters.new_verdicts().any()


def test_ngrams_of_rows_of_two_sizes_are_judged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted draft tokens of one row beyond its hindsight offset rejected draft tokens of another row."""
    controller = controlled(rows=2).controller
    verdicts = list[tuple[str, float, float]]()
    assert controller
    monkeypatch.setattr(controller.beliefs, "_predicted_acceptance", lambda tier: 0.5)
    monkeypatch.setattr(
        controller.beliefs.acceptance, "add", lambda tier, _, *counts: verdicts.append((tier, *counts[:2]))
    )
    verdict = np.array([8, 8]), np.array([8, 0]), np.array([True, True])
    controller.by_name["ngram"].counters.record_verdict(*verdict)
    controller.beliefs.learn_verdicts(Plan(("ngram", "full"), (8,)), ints([150, 900]), 1)
    assert verdicts == [("ngram", 8, 0.0)]


def test_account_and_acceptance_are_those_of_the_rows_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of passes are known, and nothing is learnt from the clock."""
    batch = controlled(rows=2)
    seconds = {1: 1e-3, 2: 3e-3}
    controller = batch.controller
    assert controller
    for rows, took in seconds.items():
        controller.costs.passes.observe("full", 1, rows, 150 * rows, took, 8)
    monkeypatch.setattr(Beliefs, "learn_passes", lambda *how: 0.0)
    batch.sequences[0].params = replace(PARAMS, temperature=0.0)
    batch.step()
    controller.account.plain_seconds = 3e-3
    batch.keep([0])
    assert controller.account.plain_seconds == pytest.approx(1e-3, rel=0.2)
    assert controller.beliefs.acceptance.temperature_band == 0
    batch.step()
    batch.join(controlled(rows=1))
    assert controller.account.plain_seconds == pytest.approx(3e-3, rel=0.2) and controller._pending == NO_PENDING
    assert (
        controller.beliefs.acceptance.temperature_band
        == AcceptanceTracker(controller.costs.acceptance, PARAMS.temperature / 2).temperature_band
    )
    batch.keep([])


def test_first_proposal_that_was_interrupted_is_no_debt() -> None:
    """A machine that slept, or a kernel that was compiled, counts as a few steps."""
    batch = controlled(rows=1)
    controller = batch.controller
    live_B = np.array([True])
    assert controller
    controller.account.plain_seconds, controller._proposals = 0.01, 2
    force(controller, DEEP, batch.prefix, live_B)
    controller.observe([150], 1, 60.0)
    controller.update_beliefs(batch.prefix)
    assert -20 * 0.01 < controller.account.gain_seconds < 0
