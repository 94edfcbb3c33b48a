"""The pilot in worlds whose best plan is known: it finds it, and gives up speculation where that loses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.helpers.simulated_tiers import World, fixed, flown, plans, worth
from tests.planner.test_controller import read
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
    "cheap full passes": World(SHORT | {"draft": (0.9 * MS, 0.0)}, {"draft": 0.5, "retrieval": 0.9}),
    "guesses that are never kept": World(LONG, {"draft": 0.02, "retrieval": 0.05}),
    "guesses that cost too much": World(HOPELESS, {"draft": 0.6, "retrieval": 0.9}),
}
PAYS = {
    "a hierarchy": World(LONG, {"draft": 0.6, "retrieval": 0.95}),
    "long bursts": World(LONG | {"draft": (0.05 * MS, 0.0)}, {"draft": 0.6, "retrieval": 0.95}, burst=0.5 * MS),
    "a draft alone": World(LONG | {"retrieval": (7 * MS, 0.2 * MS)}, {"draft": 0.8, "retrieval": 0.9}),
    "retrieval alone": World(LONG, {"draft": 0.05, "retrieval": 0.97}),
}


def informed(world: World) -> CostModel:
    """As a profile would have it."""
    costs = CostModel()
    for tier in world.costs:
        for width in (1, 3, 7) * 4:
            costs.observe(tier, width, 1, BURST if tier == "draft" else 150, world.seen(tier, width))
    return costs


def speed(world: World, costs: CostModel, proposals: int = 600, first: int = 0, seed: int = 5) -> float:
    """Of so many proposals, after the first ones, with dice of their own."""
    world, batch = replace(world, dice=random.Random(seed)), read(None)
    it = PlanController(batch.top, 1, costs, clock=lambda: 0.0)
    if first:
        flown(it, batch.prefix, world, first)
    return flown(it, batch.prefix, world, proposals)


def best(world: World) -> float:
    return fixed(max(plans(True, True), key=lambda plan: worth(plan, world)), world)


@pytest.mark.parametrize("world", LOSES.values(), ids=LOSES)
def test_where_speculation_loses_plain_decoding_it_is(world: World) -> None:
    assert speed(world, informed(world)) > 0.97 * fixed(Plan(), world)


@pytest.mark.parametrize("world", LOSES.values(), ids=LOSES)
def test_and_who_knows_nothing_finds_out(world: World) -> None:
    assert speed(world, CostModel(), first=20) > 0.97 * fixed(Plan(), world)


@pytest.mark.parametrize("world", PAYS.values(), ids=PAYS)
def test_where_it_pays_the_best_plan_is_found(world: World) -> None:
    assert speed(world, informed(world)) > 0.95 * best(world) > 1.3 * fixed(Plan(), world)


@pytest.mark.parametrize("world", LOSES.values(), ids=LOSES)
def test_a_pilot_that_never_falls_back_would_be_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def bold(self: PlanController, lengths: list[int], widely: bool) -> Plan:
        seen = self._outlook(lengths, [{}])
        flying = (plan for plan in plans(True, True) if not {"draft", "retrieval"}.isdisjoint(plan.tiers))
        return max(flying, key=lambda plan: worth(plan, seen))

    monkeypatch.setattr(PlanController, "_best", bold)
    monkeypatch.setattr(fallback, "GROUNDED", (0, 0))
    assert speed(world, informed(world)) < 0.97 * fixed(Plan(), world)


def test_costs_that_are_wrong_are_found_out() -> None:
    """What was kept from another day says that guesses are cheap; measured speed says otherwise."""
    world, other = LOSES["guesses that cost too much"], PAYS["a hierarchy"]
    speeds = [speed(world, informed(other), first=60, seed=seed) for seed in range(12)]
    assert sum(speeds) / 12 > 0.97 * fixed(Plan(), world)


def test_only_what_came_short_is_remembered_and_not_for_ever() -> None:
    for came, kept in ((2.0, 1.0), (0.5, fallback.BOUNDS[0] ** (fallback.LASTS / 2))):
        it = fallback.SpeculationFallback()
        it.speculated(fallback.Throughput(came * 800, 8.0, 8), 100.0, 0.0)
        assert it.kept() == pytest.approx(kept, rel=0.01)
    trust = 0.5
    for _ in range(40):
        trust = fallback.SpeculationFallback(trust).kept()
    assert trust > 0.98


def test_a_text_that_changes_is_followed() -> None:
    """The draft serves for a while, and then no more."""
    world = World(LONG, {"draft": 0.8, "retrieval": 0.95})
    batch = read(None)
    it = PlanController(batch.top, 1, informed(world), clock=lambda: 0.0)
    flown(it, batch.prefix, world, 200)
    assert "draft" in it.plan.tiers
    world.shares["draft"] = 0.0
    flown(it, batch.prefix, world, 200)
    assert it.plan.tiers == ("retrieval", "full")


def test_what_other_texts_taught_serves_from_the_first_proposal_on() -> None:
    world = PAYS["retrieval alone"]
    costs = informed(world)
    speed(world, costs, 40)
    assert sum(speed(world, costs, 40, seed=seed) for seed in range(10)) / 10 > 0.95 * best(world)


def test_who_has_to_learn_it_anew_in_each_text_would_be_noticed() -> None:
    world = PAYS["retrieval alone"]
    assert sum(speed(world, informed(world), 40, seed=seed) for seed in range(10)) / 10 < 0.95 * best(world)
