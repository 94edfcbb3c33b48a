"""Simulated tiers with a known best plan: passes have given costs, and draft tokens are accepted at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from triforce.engine.tier_builder import apply_plan
from triforce.planner import Plan, PlanController, TokensToCome
from triforce.planner.forecast import UNKNOWN_LENGTH
from triforce.planner.plan import Estimates, NgramOdds, expected_tokens, plan_space, proposals
from triforce.planner.planner_config import AMONG_MODELS

LIVE = np.array([True])


def plans(draft: bool, retrieval: bool) -> Iterator[Plan]:
    """Yield plain decoding, and all plans of the plan space."""
    yield from plan_space(draft, retrieval).plans


def values(expected: Estimates) -> dict[Plan, float]:
    """Return the expected tokens per second of a row for each plan, by the mean of the estimates."""
    space = plan_space(True, True)
    tokens_KZN, seconds_KZN = proposals(space, expected)
    return dict(zip(space.plans, (tokens_KZN / seconds_KZN)[0, 1].tolist(), strict=True))


def estimates(
    seconds: Callable[[str, int], float],
    shares: Mapping[str, float],
    rows: int = 1,
    match_probability: float = 0.0,
) -> Estimates:
    """Return certain estimates. N-grams match with `match_probability`, and their draft tokens have a share, too.

    seconds: by tier and tokens, of a pass over these tokens, and of a fused draft of them.
    """
    lower = "ngram", "draft", "retrieval"
    of = {tier: np.array([[0.0] + [seconds(tier, w) for w in range(1, 34)]]) for tier in (*lower, "full")}
    certain = {tier: np.full((1, 3), 1.0 if tier == "ngram" else shares.get(tier, 1.0)) for tier in lower}
    gammas_AG = np.tile(np.arange(17.0), (2, 1))
    accepted_AG = match_probability * (expected_tokens(shares.get("ngram", 0.0), gammas_AG) - 1)
    of_loops = np.zeros(2), np.zeros_like(gammas_AG), np.zeros_like(gammas_AG)
    odds = NgramOdds(np.full(2, match_probability), match_probability * gammas_AG, accepted_AG, *of_loops)
    return Estimates(rows, of | {AMONG_MODELS: of["full"]}, certain, odds)


@dataclass
class SimulatedTiers:
    """Tiers by costs, seconds of a pass and of each token, and by shares, the acceptance of each tier's draft tokens.

    fused_draft: added seconds of a fused draft, for any number of its tokens.
    budgets: by budget factor, the added seconds of a retrieval pass, and its acceptance.
    """

    costs: dict[str, tuple[float, float]]
    shares: dict[str, float]
    rows: int = 1
    fused_draft: float = 0.0
    generator: random.Random = field(default_factory=lambda: random.Random(5))
    budgets: dict[float, tuple[float, float]] = field(default_factory=dict)
    times: float = 1.0

    def cost(self, tier: str, tokens: int) -> float:
        base, per_token = self.costs[tier]
        if tier == "retrieval" and self.budgets:
            base += self.budgets[self.times][0]
        return base + per_token * tokens

    def pass_seconds(self, tier: str, tokens: int) -> float:
        """Return the seconds that counters record, of a pass or a fused draft."""
        return self.fused_draft + tokens * self.cost(tier, 1) if tier == "draft" else self.cost(tier, tokens)

    def estimates(self) -> Estimates:
        """Return the true estimates of these tiers, with the usual budget."""
        self.times = 1.0
        return estimates(self.pass_seconds, {tier: self.acceptance(tier) for tier in ("draft", "retrieval")}, self.rows)

    def acceptance(self, tier: str) -> float:
        if tier == "retrieval" and self.budgets:
            return self.budgets[self.times][1]
        return self.shares.get(tier, 1.0)

    def play(self, plan: Plan, parts: dict[str, Any] | None = None) -> tuple[int, float]:
        """Play one proposal; return its tokens and seconds. The counters of `parts` record it."""
        spent = 0.0
        self.times = dict(plan.budget_factors).popitem()[1] if plan.budget_factors else 1.0

        def passed(tier: str, tokens: int, goes_on: bool = False) -> None:
            nonlocal spent
            took = self.cost(tier, tokens) + self.fused_draft * (tier == "draft" and not goes_on)
            spent += took
            if parts:
                parts[tier].counters.record_passes(LIVE, took, tokens, continued=tier == "draft" and goes_on)

        def propose(level: int) -> int:
            tier = plan.tiers[level]
            below = plan.tiers[level - 1] if level else ""
            if tier == "ngram":
                passed(tier, 1)
                return propose(level - 1) if level else 0
            proposed = 0
            while proposed < (*plan.gammas, 1)[level]:
                draft_tokens = propose(level - 1) if level else 0
                drafter = "draft" if below == "ngram" and level > 1 else below
                accepted = 0
                while accepted < draft_tokens and self.generator.random() < self.acceptance(drafter):
                    accepted += 1
                passed(tier, draft_tokens + 1, goes_on=proposed > 0)
                if parts and draft_tokens:
                    parts[drafter].counters.record_verdict(np.array([draft_tokens]), np.array([accepted]), LIVE)
                proposed += accepted + 1
            return proposed

        return propose(len(plan.tiers) - 1), spent


def steer(
    controller: PlanController,
    prefix: Any,
    live_B: Any = LIVE,
    remaining_tokens: Callable[[], int] = lambda: UNKNOWN_LENGTH.most,
) -> None:
    """Let a controller plan the next proposal, and apply the plan to its tiers."""
    planned = controller.steer(prefix, live_B, lambda: TokensToCome(remaining_tokens(), remaining_tokens()))
    apply_plan(planned, controller.tiers)


def force(controller: PlanController, plan: Plan, prefix: Any, live_B: Any = LIVE) -> None:
    """Switch a controller and its tiers to a plan."""
    controller.switch(plan)
    apply_plan(controller.planned, controller.tiers)


class NoHindsight:
    """Hindsight on a text without repetition."""

    def update(self, prefix: object, b: int) -> int:
        return 0

    def odds(self) -> NgramOdds:
        return estimates(lambda tier, width: 1.0, {}).odds


def simulated_rate(controller: PlanController, prefix: Any, simulated: SimulatedTiers, proposals: int) -> float:
    """Return tokens per second of simulated tiers under a controller."""
    controller.beliefs.hindsight = NoHindsight()  # type: ignore[assignment]
    tokens = seconds = 0.0
    for _ in range(proposals):
        steer(controller, prefix)
        new, took = simulated.play(controller.plan, controller.by_name)
        controller.observe([int(prefix.lengths_B[0])], new, took)
        tokens = tokens + new
        seconds = seconds + took
    return tokens / seconds


def fixed(plan: Plan, simulated: SimulatedTiers, proposals: int = 4000) -> float:
    """Return tokens per second of simulated tiers under one plan, with random numbers of their own."""
    simulated = replace(simulated, generator=random.Random(7))
    tokens, seconds = (sum(series) for series in zip(*(simulated.play(plan) for _ in range(proposals)), strict=True))
    return tokens / seconds
