"""The closed form against a game of dice, and which plan wins where the answer is known."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from tests.helpers.simulated_tiers import plans, worth
from triforce.engine.config import FARTHEST
from triforce.planner.plan import Amount, Plan, expected, families, rate


@dataclass
class World:
    """Fixed costs and shares; what lookup would tell is a share, too, and it always has a guess."""

    costs: dict[str, float]
    shares: dict[str, float]
    rows: int = 1
    found: float = 1.0

    def cost(self, tier: str, tokens: Amount) -> Amount:
        return self.costs[tier] + 0.0 * tokens

    def alone(self, tier: str, tokens: Amount) -> Amount:
        return tokens * self.cost(tier, 1)

    def share(self, tier: str) -> float:
        return self.shares.get(tier, 1.0)

    def echo(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        return self.found * gamma, self.found * (expected(self.shares["ngram"], gamma) - 1), self.found


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
    predicted = worth(plan, World(costs, shares))
    assert predicted == pytest.approx(played(plan, costs, shares), rel=0.06)


@pytest.mark.parametrize(("acceptance", "guesses", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5)])
def test_what_verifying_gives(acceptance: float, guesses: int, tokens: float) -> None:
    assert expected(acceptance, guesses) == tokens


def best(costs: dict[str, float], shares: dict[str, float]) -> Plan:
    return max(plans(True, True), key=lambda plan: worth(plan, World(costs, shares)))


COSTS = {"ngram": 0.05, "draft": 0.2, "retrieval": 1.0, "full": 8.0}


@pytest.mark.parametrize(
    ("costs", "shares", "tiers"),
    [
        (COSTS, {"ngram": 0.1, "draft": 0.6, "retrieval": 0.95}, ("draft", "retrieval", "full")),
        (COSTS, {"ngram": 0.9, "draft": 0.3, "retrieval": 0.95}, ("ngram", "retrieval", "full")),
        (COSTS, {"ngram": 0.0, "draft": 0.0, "retrieval": 0.0}, ("full",)),
        (COSTS | {"full": 1.1}, {"ngram": 0.0, "draft": 0.6, "retrieval": 0.95}, ("draft", "full")),
        (COSTS | {"draft": 2.0}, {"ngram": 0.0, "draft": 0.6, "retrieval": 0.95}, ("retrieval", "full")),
    ],
)
def test_the_best_plan_where_it_is_plain(
    costs: dict[str, float], shares: dict[str, float], tiers: tuple[str, ...]
) -> None:
    assert best(costs, shares).tiers == tiers


def test_no_plan_reaches_farther_than_there_is_room() -> None:
    for plan in plans(True, True):
        low, *high = (gamma for gamma in plan.gammas[-2:] or (1,))
        assert low <= (FARTHEST[0] if high else FARTHEST[1]) and max(high, default=0) <= FARTHEST[1]


def test_no_plan_names_what_is_not_there() -> None:
    assert {tier for plan in plans(False, False) for tier in plan.tiers} == {"ngram", "full"}
    assert all(len(plan.gammas) == len(plan.tiers) - 1 for plan in plans(True, True))


def test_arrays_of_plans_are_worth_what_each_is() -> None:
    world = World(COSTS, {"ngram": 0.5, "draft": 0.6, "retrieval": 0.95}, rows=4, found=0.3)
    one_by_one = [worth(plan, world) for plan in plans(True, True) if plan != Plan()]
    together = [np.atleast_1d(rate(tiers, gammas, world)) for tiers, gammas in families(True, True)]
    np.testing.assert_allclose(np.concatenate(together), one_by_one)


def test_a_draft_with_lookup_on_it_is_worth_something_between_the_two() -> None:
    shares = {"ngram": 0.9, "draft": 0.5, "retrieval": 0.95}
    mixed = [worth(Plan(("draft", "ngram", "full"), (4, 4)), World(COSTS, shares, found=x)) for x in (0.0, 0.5, 1.0)]
    draft = worth(Plan(("draft", "full"), (4,)), World(COSTS, shares))
    lookup = worth(Plan(("ngram", "full"), (4,)), World(COSTS, shares))
    assert mixed == sorted(mixed) and mixed[0] == pytest.approx(draft, rel=0.02) and mixed[2] == pytest.approx(lookup)


def test_many_rows_wait_for_the_last_one() -> None:
    shares = {"draft": 0.6, "retrieval": 0.95}
    deep, flat = Plan(("draft", "retrieval", "full"), (2, 6)), Plan(("draft", "full"), (4,))
    one, eight = World(COSTS, shares), World(COSTS, shares, rows=8)
    assert worth(deep, eight) < 0.9 * worth(deep, one) and worth(flat, eight) == worth(flat, one)
