"""The closed form against a Monte Carlo simulation, and the best plan where it is known."""

from __future__ import annotations

import random

import pytest

from tests.helpers.simulated_tiers import estimates, plans, values
from triforce.engine.tier_builder import MAX_AUTO_TOKENS
from triforce.planner.plan import Plan, expected_tokens, plan_space, proposals


def fixed(
    costs: dict[str, float], shares: dict[str, float], rows: int = 1, match_probability: float = 1.0
) -> dict[Plan, float]:
    """Return values of plans with fixed costs and shares. N-grams match with `match_probability`."""

    def seconds(tier: str, tokens: int) -> float:
        return costs[tier] * (tokens if tier == "draft" else 1)

    return values(estimates(seconds, shares, rows, match_probability))


def played(plan: Plan, costs: dict[str, float], shares: dict[str, float], proposals: int = 4000) -> float:
    """Return tokens per second of the recursion itself, each draft token accepted with the probability of its tier."""
    generator = random.Random(1)
    spent = 0.0
    gammas = (*plan.gammas, 1)

    def propose(level: int) -> int:
        nonlocal spent
        proposed = 0
        while proposed < gammas[level]:
            draft_tokens = propose(level - 1) if level else 0
            spent += costs[plan.tiers[level]]
            accepted = 0
            while accepted < draft_tokens and generator.random() < shares[plan.tiers[level - 1]]:
                accepted += 1
            proposed += accepted + 1
        return proposed

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
def test_expected_tokens_equal_simulation(plan: Plan, shares: dict[str, float]) -> None:
    costs = {"ngram": 0.0, "draft": 0.2, "retrieval": 1.0, "full": 8.0}
    assert fixed(costs, shares)[plan] == pytest.approx(played(plan, costs, shares), rel=0.06)


@pytest.mark.parametrize(("acceptance", "draft_tokens", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5)])
def test_expected_tokens_of_verification_alone(acceptance: float, draft_tokens: int, tokens: float) -> None:
    assert expected_tokens(acceptance, draft_tokens) == tokens


def best(costs: dict[str, float], shares: dict[str, float]) -> Plan:
    rates = fixed(costs, shares)
    return max(rates, key=rates.__getitem__)


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
def test_best_plan_of_plain_cases_is_chosen(
    costs: dict[str, float], shares: dict[str, float], tiers: tuple[str, ...]
) -> None:
    assert best(costs, shares).tiers == tiers


def test_plans_reach_within_room() -> None:
    for plan in plans(True, True):
        low, *high = (gamma for gamma in plan.gammas[-2:] or (1,))
        assert (
            low <= (MAX_AUTO_TOKENS[0] if high else MAX_AUTO_TOKENS[1]) and max(high, default=0) <= MAX_AUTO_TOKENS[1]
        )


def test_plans_name_existing_tiers_only() -> None:
    assert {tier for plan in plans(False, False) for tier in plan.tiers} == {"ngram", "full"}
    assert all(len(plan.gammas) == len(plan.tiers) - 1 for plan in plans(True, True))


def test_plans_without_tiers_are_part_of_all() -> None:
    shares = {"ngram": 0.5, "draft": 0.6, "retrieval": 0.95}
    rates = fixed(COSTS, shares, rows=4, match_probability=0.3)
    expected = estimates(lambda tier, tokens: COSTS[tier], shares, 4, 0.3)
    for draft, retrieval in ((False, False), (True, False), (False, True)):
        tokens_KZN, seconds_KZN = proposals(plan_space(draft, retrieval), expected)
        rated_plans = zip(plans(draft, retrieval), (tokens_KZN / seconds_KZN)[0, 0], strict=True)
        assert all(rates[plan] == pytest.approx(rate) for plan, rate in rated_plans if "draft" not in plan.tiers)


def test_draft_with_ngram_lies_between_both() -> None:
    shares = {"ngram": 0.9, "draft": 0.5, "retrieval": 0.95}
    mixed = [
        fixed(COSTS, shares, match_probability=x)[Plan(("draft", "ngram", "full"), (4, 4))] for x in (0.0, 0.5, 1.0)
    ]
    draft, lookup = (fixed(COSTS, shares)[Plan((tier, "full"), (4,))] for tier in ("draft", "ngram"))
    assert mixed == sorted(mixed) and mixed[0] == pytest.approx(draft, rel=0.02) and mixed[2] == pytest.approx(lookup)


def test_batch_waits_for_slowest_row() -> None:
    shares = {"draft": 0.6, "retrieval": 0.95}
    deep = Plan(("draft", "retrieval", "full"), (2, 6))
    flat = Plan(("draft", "full"), (4,))
    single_row = fixed(COSTS, shares)
    eight = fixed(COSTS, shares, rows=8)
    assert eight[deep] < 0.9 * single_row[deep] and eight[flat] == pytest.approx(single_row[flat])
