"""Tables of pass costs: by number of keys, by observed routing, and after saving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triforce.model.config import Experts
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.cost_model import CostModel
from triforce.planner.pass_costs import PassCosts, TierWork


def test_table_of_several_keys_is_that_of_each() -> None:
    costs = PassCosts()
    for tier, width in (("full", 1), ("full", 8), ("full among models", 4), ("retrieval", 3)):
        costs.observe(tier, width, 1, 4096, 1e-3 * width)
    for tier in ("full", "full among models", "retrieval", "draft", "ngram"):
        together = costs.table(tier, 1, [1000, 4000, 9000], 6).copy()
        single_rows = [costs.table(tier, 1, [keys], 6)[0].copy() for keys in (1000, 4000, 9000)]
        assert np.array_equal(together, np.stack(single_rows)) and together[0, 0] == 0


def test_kind_that_ran_costs_the_same_when_routers_turn_out_otherwise() -> None:
    unions = ExpertUnions(Experts(64, 4, renormalised=True))
    work = TierWork(weight_bytes=1e8, expert_bytes=9e7, unions=unions)
    costs = PassCosts({"full": work})
    for _ in range(8):
        costs.observe("full", 8, 1, 1000, 5e-3)
    seconds_before = costs.seconds("full", 8, 1, 1000)
    for _ in range(20):
        unions.observe(8, 6.0)
    assert unions.spread < 0.5
    assert costs.seconds("full", 8, 1, 1000) == pytest.approx(seconds_before, rel=1e-3)
    assert costs.table("full", 1, [1000], 8)[0, 8] == pytest.approx(seconds_before, rel=1e-3)


def test_stall_of_one_tier_is_not_kept_for_the_others(tmp_path: Path) -> None:
    """Passes of the full tier that stalled for a second say nothing of tiers that did not run then."""
    costs = CostModel(tmp_path / "costs.json")
    for _ in range(20):
        costs.passes.observe("full", 1, 1, 8000, 0.01)
        costs.passes.observe("draft", 2, 1, 0, 0.002)
    costs.save()
    stalled = CostModel(costs.path)
    for _ in range(5):
        stalled.passes.observe("full", 1, 1, 8000, 1.0)
    assert stalled.passes.slowdown > 10
    stalled.save()
    assert CostModel(costs.path).passes.seconds("draft", 2, 1, 0) == pytest.approx(0.002, rel=0.1)
