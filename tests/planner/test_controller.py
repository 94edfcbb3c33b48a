"""The controller decides for what was measured: what each plan costs, and how much of it is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.controlled_batch import DEEP, LIVE, known, steered
from triforce.planner import CostModel, Plan, PlanController, cadence, controller, fallback, forecast
from triforce.planner.forecast import FUSED_DRAFT_KEYS


def test_controller_hierarchy_pays_when_full_pass_is_slow() -> None:
    deep, _ = steered(known(full=20e-3))
    assert deep.plan.tiers == DEEP.tiers and deep.plan.gammas[1] >= 6
    flat, _ = steered(known(full=1e-4, draft=1e-4))
    assert flat.plan == Plan()


def test_controller_small_gain_keeps_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    it, batch = steered(known(full=20e-3))
    before = it.plan
    monkeypatch.setattr(forecast, "MIN_GAIN", 100.0)
    it.costs = known(full=20e-3, draft=2e-4)
    for _ in range(2 * controller.REPLAN_EVERY):
        it.steer(batch.prefix, LIVE)
    assert it.plan == before


def test_controller_small_gain_keeps_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "MIN_GAIN_OVER_PLAIN", (100.0, 100.0))
    it, batch = steered(known(full=20e-3), steps=1)
    for _ in range(controller.REPLAN_EVERY + 2):
        it.steer(batch.prefix, LIVE)
        assert it.plan == Plan()


def test_controller_slow_machine_alone_starts_no_speculation() -> None:
    it, batch = steered(known(full=2.4e-3, retrieval=5e-3, draft=1.4e-3))  # hardly worth less than plain decoding
    assert it.plan == Plan()
    for _ in range(3 * controller.REPLAN_EVERY * cadence.REVIEW_EVERY):
        it.observe([100], 1, 4e-3)
        it.steer(batch.prefix, LIVE)
        assert it.plan == Plan()


def test_controller_slower_plan_is_avoided_ever_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "PROBE_EVERY", 10**9)
    it, batch = steered(known(full=20e-3))
    course, rests = it.plan, []
    monkeypatch.setattr(
        PlanController, "choose", lambda self, lengths, widely: course
    )  # stubborn: only the guard is left
    for _ in range(3):
        while it.plan != Plan():
            it.observe([100], 1, 1.0)  # a second for a token
            it.steer(batch.prefix, LIVE)
        rests.append(0)
        while it.plan == Plan():
            it.observe([100], 1, 0.02)
            it.steer(batch.prefix, LIVE)
            rests[-1] += 1
    assert rests[0] >= fallback.PAUSE[0] and rests[1] >= 2 * rests[0] - 1 and rests[2] >= 2 * rests[1] - 2


def test_controller_plain_decoding_is_retried() -> None:
    it, batch = steered(known(full=20e-3), steps=0)
    seen = []
    for _ in range(3 * controller.PROBE_EVERY):
        it.steer(batch.prefix, LIVE)
        seen.append(it.plan == Plan())
    assert 2 <= sum(seen) <= 6


def test_controller_overhead_is_shared_among_passes() -> None:
    it, batch = steered(CostModel(), steps=1)
    it.apply(Plan(("draft", "full"), (1,)), batch.prefix, LIVE)
    for _ in range(20):
        it.by_name["full"].counters.record_passes(LIVE, 1e-3)
        it.by_name["draft"].counters.record_passes(LIVE, 2e-4)
        it.observe([100], 1, 1.6e-3)
    assert it.costs.seconds("full", 1, 1, 100) == pytest.approx(1.2e-3, rel=1e-3)
    assert it.costs.seconds("draft", 1, 1, FUSED_DRAFT_KEYS) == pytest.approx(4e-4, rel=1e-3)


def test_controller_acceptance_carries_to_next_batch() -> None:
    costs = known(full=20e-3)
    it, _ = steered(costs)
    counters = it.by_name["draft"].counters
    for _ in range(50):
        counters.record_verdict(np.array([4]), np.array([0]), LIVE)
        it.observe([100], 1, 1e-3)
    assert it.acceptance.of("draft", 100) < 0.1
    assert steered(costs)[0].acceptance.of("draft", 100) < 0.2
    fresh, _ = steered(known(full=20e-3))
    assert fresh.acceptance.of("draft", 100) > 0.6


def test_controller_observes_attention_only_for_retrieval() -> None:
    it, batch = steered(known(full=20e-3), steps=1)
    assert it.top.cache.grain > 0 and it.plan.tiers == DEEP.tiers
    it.current_plan = Plan()
    it.steer(batch.prefix, LIVE)
    assert it.plan == Plan() and it.top.cache.grain == 0
    it.current_plan, it.idle = DEEP, False
    it.steer(batch.prefix, LIVE)
    assert it.plan == Plan() and it.top.cache.grain > 0  # first the exact tier looks
    it.steer(batch.prefix, LIVE)
    assert it.plan == DEEP
