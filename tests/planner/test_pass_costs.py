"""Tables of pass costs: those of each number of keys, and of what routers turn out to choose."""

from __future__ import annotations

import numpy as np
import pytest

from triforce.model.architecture import Experts
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.pass_costs import PassCosts
from triforce.planner.tier_work import TierWork


def test_table_of_several_keys_is_that_of_each() -> None:
    costs = PassCosts()
    for tier, width in (("full", 1), ("full", 8), ("full among models", 4), ("retrieval", 3)):
        costs.observe(tier, width, 1, 4096, 1e-3 * width)
    for tier in ("full", "full among models", "retrieval", "draft", "ngram"):
        together = costs.table(tier, 1, [1000, 4000, 9000], 6).copy()
        alone = [costs.table(tier, 1, [keys], 6)[0].copy() for keys in (1000, 4000, 9000)]
        assert np.array_equal(together, np.stack(alone)) and together[0, 0] == 0


def test_kind_that_ran_costs_the_same_when_routers_turn_out_otherwise() -> None:
    unions = ExpertUnions(Experts(64, 4, renormalised=True))
    work = TierWork(weights=1e8, experts=9e7, unions=unions)
    costs = PassCosts({"full": work})
    for _ in range(8):
        costs.observe("full", 8, 1, 1000, 5e-3)
    before = costs.seconds("full", 8, 1, 1000)
    for _ in range(20):
        unions.observe(8, 6.0)
    assert unions.spread < 0.5
    assert costs.seconds("full", 8, 1, 1000) == pytest.approx(before, rel=1e-3)
    assert costs.table("full", 1, [1000], 8)[0, 8] == pytest.approx(before, rel=1e-3)
