"""The controller in simulations whose best plan is known: it finds it, and gives up speculation where that loses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.helpers.controlled_batch import read
from tests.helpers.simulated_tiers import Simulation, fixed, plans, simulated_rate, worth
from triforce.planner import CostModel, Plan, PlanController, fallback
from triforce.planner.forecast import BURST

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
    "cheap full passes": Simulation(SHORT | {"draft": (0.9 * MS, 0.0)}, {"draft": 0.5, "retrieval": 0.9}),
    "guesses that are never kept": Simulation(LONG, {"draft": 0.02, "retrieval": 0.05}),
    "guesses that cost too much": Simulation(HOPELESS, {"draft": 0.6, "retrieval": 0.9}),
}
PAYS = {
    "a hierarchy": Simulation(LONG, {"draft": 0.6, "retrieval": 0.95}),
    "long bursts": Simulation(LONG | {"draft": (0.05 * MS, 0.0)}, {"draft": 0.6, "retrieval": 0.95}, burst=0.5 * MS),
    "a draft alone": Simulation(LONG | {"retrieval": (7 * MS, 0.2 * MS)}, {"draft": 0.8, "retrieval": 0.9}),
    "retrieval alone": Simulation(LONG, {"draft": 0.05, "retrieval": 0.97}),
}


def informed(simulation: Simulation) -> CostModel:
    """As a profile would have it."""
    costs = CostModel()
    for tier in simulation.costs:
        for width in (1, 3, 7) * 4:
            costs.observe(tier, width, 1, BURST if tier == "draft" else 150, simulation.seen(tier, width))
    return costs


def speed(simulation: Simulation, costs: CostModel, proposals: int = 600, first: int = 0, seed: int = 5) -> float:
    """Of so many proposals, after the first ones, with dice of their own."""
    simulation, batch = replace(simulation, dice=random.Random(seed)), read(None)
    it = PlanController(batch.top, 1, costs, clock=lambda: 0.0)
    if first:
        simulated_rate(it, batch.prefix, simulation, first)
    return simulated_rate(it, batch.prefix, simulation, proposals)


def best(simulation: Simulation) -> float:
    return fixed(max(plans(True, True), key=lambda plan: worth(plan, simulation)), simulation)


@pytest.mark.parametrize("simulation", LOSES.values(), ids=LOSES)
def test_losing_speculation_ends_in_plain_decoding(simulation: Simulation) -> None:
    assert speed(simulation, informed(simulation)) > 0.97 * fixed(Plan(), simulation)


@pytest.mark.parametrize("simulation", LOSES.values(), ids=LOSES)
def test_losing_speculation_is_found_without_prior(simulation: Simulation) -> None:
    assert speed(simulation, CostModel(), first=20) > 0.97 * fixed(Plan(), simulation)


@pytest.mark.parametrize("simulation", PAYS.values(), ids=PAYS)
def test_winning_plan_is_found(simulation: Simulation) -> None:
    assert speed(simulation, informed(simulation)) > 0.95 * best(simulation) > 1.3 * fixed(Plan(), simulation)


@pytest.mark.parametrize("simulation", LOSES.values(), ids=LOSES)
def test_controller_without_fallback_is_detected(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    def bold(self: PlanController, lengths: list[int], widely: bool) -> Plan:
        seen = self._outlook(lengths, [{}])
        flying = (plan for plan in plans(True, True) if not {"draft", "retrieval"}.isdisjoint(plan.tiers))
        return max(flying, key=lambda plan: worth(plan, seen))

    monkeypatch.setattr(PlanController, "_best", bold)
    monkeypatch.setattr(fallback, "GROUNDED", (0, 0))
    assert speed(simulation, informed(simulation)) < 0.97 * fixed(Plan(), simulation)


def test_wrong_costs_are_corrected() -> None:
    """What was kept from another day says that guesses are cheap; measured speed says otherwise."""
    simulation, other = LOSES["guesses that cost too much"], PAYS["a hierarchy"]
    speeds = [speed(simulation, informed(other), first=60, seed=seed) for seed in range(12)]
    assert sum(speeds) / 12 > 0.97 * fixed(Plan(), simulation)


def test_memory_of_failures_is_limited() -> None:
    for came, kept in ((2.0, 1.0), (0.5, fallback.BOUNDS[0] ** (fallback.LASTS / 2))):
        it = fallback.SpeculationFallback()
        it.speculated(fallback.Throughput(came * 800, 8.0, 8), 100.0, 0.0)
        assert it.kept() == pytest.approx(kept, rel=0.01)
    trust = 0.5
    for _ in range(40):
        trust = fallback.SpeculationFallback(trust).kept()
    assert trust > 0.98


def test_changing_text_is_followed() -> None:
    """The draft serves for a while, and then no more."""
    simulation = Simulation(LONG, {"draft": 0.8, "retrieval": 0.95})
    batch = read(None)
    it = PlanController(batch.top, 1, informed(simulation), clock=lambda: 0.0)
    simulated_rate(it, batch.prefix, simulation, 200)
    assert "draft" in it.plan.tiers
    simulation.shares["draft"] = 0.0
    simulated_rate(it, batch.prefix, simulation, 200)
    assert it.plan.tiers == ("retrieval", "full")


def test_prior_acceptance_helps_from_first_proposal() -> None:
    simulation = PAYS["retrieval alone"]
    costs = informed(simulation)
    speed(simulation, costs, 40)
    assert sum(speed(simulation, costs, 40, seed=seed) for seed in range(10)) / 10 > 0.95 * best(simulation)


def test_controller_without_prior_is_detected() -> None:
    simulation = PAYS["retrieval alone"]
    speeds = [speed(simulation, informed(simulation), 40, seed=seed) for seed in range(10)]
    assert sum(speeds) / 10 < 0.95 * best(simulation)
