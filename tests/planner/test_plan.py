"""The closed form against a game of dice, and which plan wins where the answer is known."""

from __future__ import annotations

import random

import pytest

from triforce.planner.plan import Plan, expected, plans


def played(plan: Plan, costs: dict[str, float], shares: dict[str, float], proposals: int = 4000) -> float:
    """Tokens per second of the recursion itself, each guess kept with the probability of its tier."""
    dice, spent = random.Random(1), 0.0
    gammas = (*plan.gammas, 1)

    def propose(level: int) -> int:
        nonlocal spent
        held = 0
        while held < gammas[level]:
            guesses = propose(level - 1) if level else 0
            spent += costs[plan.tiers[level]]
            kept = 0
            while kept < guesses and dice.random() < shares[plan.tiers[level - 1]]:
                kept += 1
            held += kept + 1
        return held

    return sum(propose(len(plan.tiers) - 1) for _ in range(proposals)) / spent


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(("draft", "full"), (4,)),
        Plan(("retrieval", "full"), (8,)),
        Plan(("draft", "retrieval", "full"), (1, 1)),
        Plan(("draft", "retrieval", "full"), (2, 6)),
        Plan(("draft", "retrieval", "full"), (4, 16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shares", [{"draft": 0.6, "retrieval": 0.9}, {"draft": 0.2, "retrieval": 0.98}])
def test_the_closed_form_foretells_the_game(plan: Plan, shares: dict[str, float]) -> None:
    costs = {"draft": 0.2, "retrieval": 1.0, "full": 8.0}
    foretold = plan.rate(lambda tier, tokens: costs[tier], lambda below, tier: shares[below])
    assert foretold == pytest.approx(played(plan, costs, shares), rel=0.06)


@pytest.mark.parametrize(("acceptance", "guesses", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5)])
def test_what_verifying_gives(acceptance: float, guesses: int, tokens: float) -> None:
    assert expected(acceptance, guesses) == tokens


def best(costs: dict[str, float], shares: dict[str, float]) -> Plan:
    return max(plans(True, True), key=lambda plan: plan.rate(lambda t, n: costs[t], lambda b, t: shares[b]))


COSTS = {"lookup": 0.05, "draft": 0.2, "retrieval": 1.0, "full": 8.0}


@pytest.mark.parametrize(
    ("costs", "shares", "tiers"),
    [
        (COSTS, {"lookup": 0.1, "draft": 0.6, "retrieval": 0.95}, ("draft", "retrieval", "full")),
        (COSTS, {"lookup": 0.9, "draft": 0.3, "retrieval": 0.95}, ("lookup", "retrieval", "full")),
        (COSTS, {"lookup": 0.0, "draft": 0.0, "retrieval": 0.0}, ("full",)),
        (COSTS | {"full": 1.1}, {"lookup": 0.0, "draft": 0.6, "retrieval": 0.95}, ("draft", "full")),
        (COSTS | {"draft": 2.0}, {"lookup": 0.0, "draft": 0.6, "retrieval": 0.95}, ("retrieval", "full")),
    ],
)
def test_the_best_plan_where_it_is_plain(
    costs: dict[str, float], shares: dict[str, float], tiers: tuple[str, ...]
) -> None:
    assert best(costs, shares).tiers == tiers


def test_no_plan_names_what_is_not_there() -> None:
    assert {tier for plan in plans(False, False) for tier in plan.tiers} == {"lookup", "full"}
    assert all(len(plan.gammas) == len(plan.tiers) - 1 for plan in plans(True, True))
