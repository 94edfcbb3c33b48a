"""The controller decides for what was measured: what each plan costs, and how much of it is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.controlled_batch import DEEP, LIVE, known, steered
from tests.helpers.simulated_tiers import Simulation
from triforce.planner import CostModel, Plan, PlanController, cadence, choose, controller, fallback
from triforce.planner.forecast import BURST


def test_controller_hierarchy_pays_when_full_pass_is_slow() -> None:
    deep, _ = steered(known(full=20e-3))
    assert deep.plan.tiers == DEEP.tiers and deep.plan.gammas[1] >= 6
    flat, _ = steered(known(full=1e-4, draft=1e-4))
    assert flat.plan == Plan()


def test_controller_small_gain_keeps_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    it, batch = steered(known(full=20e-3))
    before = it.plan
    monkeypatch.setattr(choose, "BETTER", 100.0)
    it.costs = known(full=20e-3, draft=2e-4)
    for _ in range(2 * controller.EVERY):
        it.steer(batch.prefix, LIVE)
    assert it.plan == before


def test_controller_small_gain_keeps_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "SAFE", (100.0, 100.0))
    it, batch = steered(known(full=20e-3), steps=1)
    for _ in range(controller.EVERY + 2):
        it.steer(batch.prefix, LIVE)
        assert it.plan == Plan()


def test_controller_slow_machine_alone_starts_no_speculation() -> None:
    it, batch = steered(known(full=2.4e-3, retrieval=5e-3, draft=1.4e-3))  # hardly worth less than plain decoding
    assert it.plan == Plan()
    for _ in range(3 * controller.EVERY * cadence.SOMETIMES):
        it.learn([100], 1, 4e-3)
        it.steer(batch.prefix, LIVE)
        assert it.plan == Plan()


def test_controller_slower_plan_is_avoided_ever_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "PROBE", 10**9)
    it, batch = steered(known(full=20e-3))
    course, rests = it.plan, []
    monkeypatch.setattr(
        PlanController, "_best", lambda self, lengths, widely: course
    )  # stubborn: only the guard is left
    for _ in range(3):
        while it.plan != Plan():
            it.learn([100], 1, 1.0)  # a second for a token
            it.steer(batch.prefix, LIVE)
        rests.append(0)
        while it.plan == Plan():
            it.learn([100], 1, 0.02)
            it.steer(batch.prefix, LIVE)
            rests[-1] += 1
    assert rests[0] >= fallback.GROUNDED[0] and rests[1] >= 2 * rests[0] - 1 and rests[2] >= 2 * rests[1] - 2


def test_controller_plain_decoding_is_retried() -> None:
    it, batch = steered(known(full=20e-3), steps=0)
    seen = []
    for _ in range(3 * controller.PROBE):
        it.steer(batch.prefix, LIVE)
        seen.append(it.plan == Plan())
    assert 2 <= sum(seen) <= 6


def test_controller_overhead_is_shared_among_passes() -> None:
    it, batch = steered(CostModel(), steps=1)
    it.wire(Plan(("draft", "full"), (1,)), batch.prefix, LIVE)
    for _ in range(20):
        it._parts["full"].counters.passed(LIVE, 1e-3)
        it._parts["draft"].counters.passed(LIVE, 2e-4)
        it.learn([100], 1, 1.6e-3)
    assert it.costs.seconds("full", 1, 1, 100) == pytest.approx(1.2e-3, rel=1e-3)
    assert it.costs.seconds("draft", 1, 1, BURST) == pytest.approx(4e-4, rel=1e-3)


def test_controller_acceptance_carries_to_next_batch() -> None:
    costs = known(full=20e-3)
    it, _ = steered(costs)
    counters = it._parts["draft"].counters
    for _ in range(50):
        counters.record_verdict(np.array([4]), np.array([0]), LIVE)
        it.learn([100], 1, 1e-3)
    assert it._watch.share("draft", 100) < 0.1
    assert steered(costs)[0]._watch.share("draft", 100) < 0.2
    fresh, _ = steered(known(full=20e-3))
    assert fresh._watch.share("draft", 100) > 0.6


def test_controller_observes_attention_only_for_retrieval() -> None:
    it, batch = steered(known(full=20e-3), steps=1)
    assert it.top.cache.grain > 0 and it.plan.tiers == DEEP.tiers
    it._course = Plan()
    it.steer(batch.prefix, LIVE)
    assert it.plan == Plan() and it.top.cache.grain == 0
    it._course, it._calm = DEEP, False
    it.steer(batch.prefix, LIVE)
    assert it.plan == Plan() and it.top.cache.grain > 0  # first the exact tier looks
    it.steer(batch.prefix, LIVE)
    assert it.plan == DEEP


def test_controller_profiles_unknown_tiers_in_first_text() -> None:
    """Plain decoding first, then every tier, wide and narrow; a text that ends before shows nothing."""
    paces = {"ngram": (2e-5, 0.0), "draft": (3e-4, 0.0), "retrieval": (1.6e-3, 1e-4), "full": (8e-3, 2e-4)}
    costs, simulation = CostModel(), Simulation(paces, {"draft": 0.6, "retrieval": 0.95})
    it, batch = steered(costs, steps=0)
    tried: list[Plan] = []
    for _ in range(controller.PLAINLY + len(controller.FIRST["draft"])):
        it.steer(batch.prefix, LIVE)
        tried.append(it.plan)
        it.learn([100], *simulation.play(it.plan, it._parts))
    assert tried[: controller.PLAINLY] == [Plan()] * controller.PLAINLY
    assert [plan.gammas for plan in tried[controller.PLAINLY :]] == controller.FIRST["draft"]
    it.steer(batch.prefix, LIVE)
    assert costs.knows("full", "retrieval", "draft")
    for tier, width, keys in (("full", 1, 100), ("full", 7, 100), ("retrieval", 3, 48)):
        assert costs.seconds(tier, width, 1, keys) == pytest.approx(simulation.cost(tier, width), rel=0.2)
    assert steered(costs, steps=1)[0]._unseen is None
