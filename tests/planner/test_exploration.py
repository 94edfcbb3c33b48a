"""Unknown tiers are tried within the first text: no pass runs for exploration alone."""

from __future__ import annotations

import pytest

from tests.helpers.controlled_batch import read
from tests.helpers.simulated_tiers import NoHindsight, SimulatedTiers, steer
from triforce.engine.tier_builder import unlink_tiers
from triforce.planner import CostModel, Plan, PlanController
from triforce.planner.pass_costs import TierWork
from triforce.planner.planner_config import CONFIG


def test_controller_tries_unknown_tiers_in_first_text() -> None:
    """The first proposals are plain, so that the first token waits for the prompt alone."""
    paces = {"ngram": (2e-5, 0.0), "draft": (3e-4, 0.0), "retrieval": (1.6e-3, 1e-4), "full": (8e-3, 2e-4)}
    works = {name: TierWork(8, 1e6, 1e6) for name in ("full", "retrieval")}
    costs = CostModel(works=works)
    simulated = SimulatedTiers(paces, {"draft": 0.6, "retrieval": 0.95})
    batch = read(None)
    tried = list[Plan]()
    controller = PlanController(unlink_tiers(batch.top), costs, clock=lambda: 0.0)
    controller.beliefs.hindsight = NoHindsight()  # type: ignore[assignment]
    for _ in range(30):
        steer(controller, batch.prefix, remaining_tokens=lambda: 300)
        tried.append(controller.plan)
        controller.observe([150], *simulated.play(controller.plan, controller.by_name))
    controller.update_beliefs(batch.prefix)
    plain_proposals = CONFIG.first_proposals
    assert set(tried[:plain_proposals]) == {Plan()} and Plan() not in tried[plain_proposals + 1 : plain_proposals + 5]
    assert all(costs.passes.of(tier).count for tier in ("full", "retrieval", "draft"))
    assert costs.passes.seconds("full", 1, 1, 150) == pytest.approx(8.2e-3)
