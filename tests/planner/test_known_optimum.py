"""The controller with simulated tiers: it finds the known best plan, and stops speculation where that loses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.helpers.controlled_batch import read
from tests.helpers.simulated_tiers import SimulatedTiers, fixed, simulated_rate, values
from triforce.engine.tier_builder import unlink_tiers
from triforce.planner import CostModel, Plan, PlanController, controller
from triforce.planner.forecast import Choice, State, TokensToCome, candidates
from triforce.planner.planner_config import CONFIG

MS = 1e-3
LONG = {
    "ngram": (0.02 * MS, 0.0),
    "draft": (0.3 * MS, 0.0),
    "retrieval": (1.6 * MS, 0.1 * MS),
    "full": (8 * MS, 0.2 * MS),
}
SHORT = LONG | {"retrieval": (1.0 * MS, 0.1 * MS), "full": (1.1 * MS, 0.1 * MS)}
HOPELESS = LONG | {"draft": (8 * MS, 0.0), "retrieval": (7.5 * MS, 0.2 * MS)}
LOSES = {
    "cheap full passes": SimulatedTiers(SHORT | {"draft": (0.9 * MS, 0.0)}, {"draft": 0.5, "retrieval": 0.9}),
    "draft tokens that are never accepted": SimulatedTiers(LONG, {"draft": 0.02, "retrieval": 0.05}),
    "draft tokens that cost too much": SimulatedTiers(HOPELESS, {"draft": 0.6, "retrieval": 0.9}),
}
PAYS = {
    "a hierarchy": SimulatedTiers(LONG, {"draft": 0.6, "retrieval": 0.95}),
    "long fused drafts": SimulatedTiers(
        LONG | {"draft": (0.05 * MS, 0.0)}, {"draft": 0.6, "retrieval": 0.95}, fused_draft=0.5 * MS
    ),
    "a draft alone": SimulatedTiers(LONG | {"retrieval": (7 * MS, 0.2 * MS)}, {"draft": 0.8, "retrieval": 0.9}),
    "retrieval alone": SimulatedTiers(LONG, {"draft": 0.05, "retrieval": 0.97}),
}


def informed(simulated: SimulatedTiers) -> CostModel:
    """Return costs as a profile of these tiers would hold them."""
    costs = CostModel()
    for tier in simulated.costs:
        for width in (1, 3, 7) * 4:
            costs.passes.observe(tier, width, 1, 0 if tier == "draft" else 150, simulated.pass_seconds(tier, width))
    return costs


def speed(simulated: SimulatedTiers, costs: CostModel, proposals: int = 600, warm_up: int = 0, seed: int = 5) -> float:
    """Return tokens per second of `proposals` proposals after `warm_up` others, with random numbers of `seed`."""
    simulated = replace(simulated, generator=random.Random(seed))
    batch = read(None)
    controller = PlanController(unlink_tiers(batch.top), costs, clock=lambda: 0.0)
    if warm_up:
        simulated_rate(controller, batch.prefix, simulated, warm_up)
    return simulated_rate(controller, batch.prefix, simulated, proposals)


def best(simulated: SimulatedTiers) -> float:
    rates = values(simulated.estimates())
    return fixed(max(rates, key=rates.__getitem__), simulated)


@pytest.mark.parametrize("simulated", LOSES.values(), ids=LOSES)
def test_losing_speculation_ends_in_plain_decoding(simulated: SimulatedTiers) -> None:
    assert speed(simulated, informed(simulated)) > 0.97 * fixed(Plan(), simulated)


@pytest.mark.parametrize("simulated", LOSES.values(), ids=LOSES)
def test_losing_speculation_is_found_without_prior(simulated: SimulatedTiers) -> None:
    assert speed(simulated, CostModel(), warm_up=20) > 0.97 * fixed(Plan(), simulated)


@pytest.mark.parametrize("simulated", PAYS.values(), ids=PAYS)
def test_winning_plan_is_found(simulated: SimulatedTiers) -> None:
    assert speed(simulated, informed(simulated)) > 0.95 * best(simulated) > 1.3 * fixed(Plan(), simulated)


@pytest.mark.parametrize("simulated", LOSES.values(), ids=LOSES)
def test_controller_without_fallback_is_detected(simulated: SimulatedTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    def bold(self: PlanController, lengths: list[int], to_come: TokensToCome, unread_tokens: int) -> Choice:
        ranked = candidates(
            self.beliefs.estimates(lengths, self.account.caution), True, True, [()], to_come, float("inf")
        )
        fastest = max(
            (candidate for candidate in ranked[1:] if candidate.plan.tiers[0] != "ngram"),
            key=lambda candidate: candidate.rate,
        )
        return Choice(fastest.plan, fastest.rate, state=State.SPECULATING)

    monkeypatch.setattr(PlanController, "choose", bold)
    monkeypatch.setattr(controller, "CONFIG", replace(CONFIG, allowed_loss=10.0))
    assert speed(simulated, informed(simulated)) < 0.97 * fixed(Plan(), simulated)


@pytest.mark.slow
def test_wrong_costs_are_corrected() -> None:
    """A saved profile says that draft tokens are cheap. Measured speed says otherwise."""
    simulated = LOSES["draft tokens that cost too much"]
    believed = PAYS["a hierarchy"]
    speeds = [speed(simulated, informed(believed), warm_up=60, seed=seed) for seed in range(12)]
    assert sum(speeds) / 12 > 0.97 * fixed(Plan(), simulated)


def test_changing_text_is_followed() -> None:
    """The draft's tokens are accepted for a while, and then no more."""
    simulated = SimulatedTiers(LONG, {"draft": 0.8, "retrieval": 0.95})
    batch = read(None)
    controller = PlanController(unlink_tiers(batch.top), informed(simulated), clock=lambda: 0.0)
    simulated_rate(controller, batch.prefix, simulated, 200)
    assert "draft" in controller.plan.tiers
    simulated.shares["draft"] = 0.0
    simulated_rate(controller, batch.prefix, simulated, 200)
    assert controller.plan.tiers == ("retrieval", "full")


def test_prior_acceptance_helps_from_first_proposal() -> None:
    simulated = PAYS["retrieval alone"]
    costs = informed(simulated)
    speed(simulated, costs, 40)
    assert sum(speed(simulated, costs, 20, seed=seed) for seed in range(10)) / 10 > 0.95 * best(simulated)


def test_controller_without_prior_is_detected() -> None:
    simulated = PAYS["retrieval alone"]
    assert sum(speed(simulated, informed(simulated), 20, seed=seed) for seed in range(10)) / 10 < 0.95 * best(simulated)
