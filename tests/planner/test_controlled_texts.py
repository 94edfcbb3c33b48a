"""The text, or its law, is that of plain decoding under any decision of the controller."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.controlled_batch import DEEP, PARAMS, ROWS, controlled, replan_always
from tests.helpers.laws.gtest import ALPHA, ranks, window_surprise
from tests.helpers.laws.tiny import MODELS, SETTING, finished, laws, started
from tests.helpers.simulated_tiers import force
from triforce.engine.tier_builder import ModelSet
from triforce.planner import Plan, PlanController
from triforce.planner.forecast import Choice
from triforce.speculation import SequenceState, Tier


def plain() -> Tensor:
    return finished(started("ar", "seeded", PARAMS, ROWS))


def test_random_plans_keep_seeded_text(random_plans: list[Plan]) -> None:
    monkey = controlled()
    assert torch.equal(finished(monkey), plain())
    assert len({plan.tiers for plan in random_plans}) > 4


def test_random_plans_without_draft_keep_text(random_plans: list[Plan]) -> None:
    assert torch.equal(finished(controlled(models=ModelSet(MODELS.target))), plain())
    assert not any("draft" in plan.tiers for plan in random_plans)


def law_stays(coupling: str, random_plans: list[Plan], rows: int, bound: float) -> None:
    texts_BT = finished(controlled(coupling, rows=rows))
    laws_BTV = laws(texts_BT, PARAMS)
    likings_BTV = laws_BTV / (laws(texts_BT, PARAMS, MODELS.draft) + 1e-9)  # where a fault would show most
    p_value, detectable_variation = window_surprise(ranks(texts_BT, laws_BTV, likings_BTV), 12, 2, 4)
    print(f"p = {p_value:.3f}; detectable total variation {detectable_variation:.4f}")
    assert detectable_variation < bound and p_value > ALPHA and len({plan.tiers for plan in random_plans}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["rejection", "block"])
def test_random_plans_keep_law_under_rejection(coupling: str, random_plans: list[Plan]) -> None:
    law_stays(coupling, random_plans, 120, 0.08)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["rejection", "block"])
def test_random_plans_keep_law_of_many_texts(coupling: str, random_plans: list[Plan]) -> None:
    law_stays(coupling, random_plans, 300, 0.05)


def test_controller_plans_keep_seeded_text() -> None:
    batch = controlled()
    assert torch.equal(finished(batch), plain())
    assert [tier.name for tier in batch.tiers] == ["ngram", "draft", "retrieval", "full"]
    assert {origin for sequence in batch.sequences for origin in sequence.origins} <= {
        tier.name for tier in batch.tiers
    }
    for sequence in batch.sequences:
        assert sum(stretch.tokens for stretch in sequence.timeline) == len(sequence.tokens)


def test_plan_waits_for_draft_that_missed_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a draft begins once the draft has read the texts; a few missed tokens are fed by its next pass."""
    monkeypatch.setattr(PlanController, "choose", lambda *how: Choice(DEEP))
    replan_always(monkeypatch)
    batch = controlled(rows=2)
    controller = batch.controller
    live_B = np.array([True, True])
    assert controller
    draft = controller.by_name["draft"]
    assert isinstance(draft, Tier)
    for written, waits in ((0, True), (10, False), (100, True)):
        longer = SequenceState(batch.prefix.ids_BS, batch.prefix.lengths_B + written)
        force(controller, Plan(), batch.prefix, live_B)
        lengths = draft.cache.lengths_B.copy()
        controller.steer(longer, live_B)
        controller.steer(longer, live_B)
        assert controller.awaited_draft is (draft if waits else None)
        assert controller.plan == (Plan() if waits else DEEP)
        assert (draft.cache.lengths_B == lengths).all(), "a decision reads nothing"
        fed_tokens = sum(draft.catch_up(longer, live_B))
        assert (draft.cache.lengths_B == (longer.lengths_B - 1 if waits else lengths)).all()
        assert 0 < fed_tokens <= 2 * (SETTING.sinks + SETTING.window + draft.cache.unit) if waits else not fed_tokens
        controller.steer(longer, live_B)
        assert controller.plan == DEEP and controller.awaited_draft is None
