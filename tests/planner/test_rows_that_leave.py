"""Rows leave a batch one after another, and come again: what their proposals showed is learnt once, of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.helpers.controlled_batch import DEEP, controlled, think_always
from triforce.engine.sequence_batch import SequenceBatch
from triforce.planner import Plan, PlanController
from triforce.planner.acceptance import AcceptanceTracker
from triforce.planner.choose import Choice
from triforce.speculation.counters import Counters

BOTH = Plan(("ngram", "draft", "retrieval", "full"), (4, 2, 6))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Accepted tokens of each tier, as they are learnt."""
    found, add = Counter[str](), AcceptanceTracker.add

    def counted(self: AcceptanceTracker, tier: str, length: int, accepted: float, *more: float) -> None:
        found[tier] += int(accepted)
        add(self, tier, length, accepted, *more)

    monkeypatch.setattr(AcceptanceTracker, "add", counted)
    return found


@pytest.fixture(params=[DEEP, BOTH], ids=str)
def batch(
    request: pytest.FixtureRequest, learnt: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SequenceBatch]:
    """Four rows that always follow one plan."""
    monkeypatch.setattr(PlanController, "choose", lambda *how: Choice(request.param))
    think_always(monkeypatch)
    made = controlled(rows=4)
    for _ in range(3):
        made.step()
    yield made
    made.keep([])


def accepted(batch: SequenceBatch, rows: list[int]) -> Counter[str]:
    """Tokens of the lower tiers that these rows have accepted."""
    return Counter({tier.name: int(tier.counters.accepted_B[rows].sum()) for tier in batch.tiers[:-1]})


def test_verdicts_on_rows_that_leave_one_by_one_are_learnt(batch: SequenceBatch, learnt: Counter[str]) -> None:
    made = accepted(batch, [1, 3])
    batch.keep([0, 2, 3])
    batch.keep([0, 1])
    batch.step()
    made += accepted(batch, [0, 1])
    batch.keep([1])
    assert batch.controller
    batch.controller.close(batch.prefix)
    assert +learnt == +made and sum(made.values()) > 0


def test_verdicts_on_row_that_comes_again_are_learnt_once(batch: SequenceBatch) -> None:
    for tier in batch.tiers:
        fresh = Counters(1)
        fresh.swap_in(0, tier.counters.swap_out(1))
        assert fresh.accepted_B == tier.counters.accepted_B[1] and not fresh.new_verdicts().any()
