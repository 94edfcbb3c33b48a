"""Plans that show what passes cost, where that is not known."""

from __future__ import annotations

import pytest

from tests.helpers.controlled_batch import LIVE, steered
from tests.helpers.simulated_tiers import SimulatedTiers
from triforce.planner import CostModel, Plan, cadence


def test_controller_profiles_unknown_tiers_in_first_text() -> None:
    """Plain decoding first, then every tier, wide and narrow; a text that ends before shows nothing."""
    paces = {"ngram": (2e-5, 0.0), "draft": (3e-4, 0.0), "retrieval": (1.6e-3, 1e-4), "full": (8e-3, 2e-4)}
    costs, simulated = CostModel(), SimulatedTiers(paces, {"draft": 0.6, "retrieval": 0.95})
    it, batch = steered(costs, steps=0)
    tried: list[Plan] = []
    for _ in range(cadence.PLAIN_PROPOSALS + len(cadence.GAMMAS["draft"])):
        it.steer(batch.prefix, LIVE)
        tried.append(it.plan)
        it.observe([100], *simulated.play(it.plan, it.by_name))
    assert tried[: cadence.PLAIN_PROPOSALS] == [Plan()] * cadence.PLAIN_PROPOSALS
    assert [plan.gammas for plan in tried[cadence.PLAIN_PROPOSALS :]] == cadence.GAMMAS["draft"]
    it.steer(batch.prefix, LIVE)
    assert costs.knows("full", "retrieval", "draft")
    for tier, width, keys in (("full", 1, 100), ("full", 7, 100), ("retrieval", 3, 48)):
        assert costs.seconds(tier, width, 1, keys) == pytest.approx(simulated.cost(tier, width), rel=0.2)
    assert steered(costs, steps=1)[0].exploration is None
