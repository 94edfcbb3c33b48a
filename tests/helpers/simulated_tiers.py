"""A world whose best plan is known: tiers cost what they are said to, and their guesses are kept by dice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from triforce.planner import Plan, PlanController
from triforce.planner.plan import Amount, families, rate
from triforce.planner.plan import TierEstimates as Known

LIVE = np.array([True])


def plans(draft: bool, retrieval: bool) -> Iterator[Plan]:
    """Plain decoding, and all plans of all families, one by one."""
    yield Plan()
    for tiers, gammas in families(draft, retrieval):
        for one in zip(*(each.tolist() for each in gammas), strict=True):
            yield Plan(tiers, one)


def worth(plan: Plan, world: Known) -> float:
    """Tokens per second of each row that are to be expected of one plan."""
    return float(rate(plan.tiers, plan.gammas, world))


@dataclass
class World:
    """Seconds of a pass (whatever it feeds, and for each token), and the share of each tier's guesses that is kept.

    burst: the seconds more that a draft's guesses take, however many are made one after another.
    budgets: of so many times the usual budget, the seconds more that a retrieval pass takes, and the share kept.
    """

    costs: dict[str, tuple[float, float]]
    shares: dict[str, float]
    rows: int = 1
    burst: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(5))
    budgets: dict[float, tuple[float, float]] = field(default_factory=dict)
    times: float = 1.0

    def cost(self, tier: str, tokens: Amount) -> Amount:
        base, each = self.costs[tier]
        if tier == "retrieval" and self.budgets:
            base += self.budgets[self.times][0]
        return base + each * tokens

    def alone(self, tier: str, tokens: Amount) -> Amount:
        return self.burst * (tier == "draft") + tokens * self.cost(tier, 1)

    def seen(self, tier: str, tokens: int) -> float:
        """Seconds that counters tell of: a pass, or a burst of the draft."""
        return float(self.alone(tier, tokens) if tier == "draft" else self.cost(tier, tokens))

    def share(self, tier: str) -> float:
        if tier == "retrieval" and self.budgets:
            return self.budgets[self.times][1]
        return self.shares.get(tier, 1.0)

    def echo(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        return 0.0 * gamma, 0.0 * gamma, 0.0  # nothing repeats itself

    def play(self, plan: Plan, parts: dict[str, Any] | None = None) -> tuple[int, float]:
        """One proposal: the tokens it gives and the seconds it takes; the counters of the parts hear of it."""
        spent, self.times = 0.0, dict(plan.times).popitem()[1] if plan.times else 1.0

        def passed(tier: str, tokens: int, goes_on: bool = False) -> None:
            nonlocal spent
            took = self.cost(tier, tokens) + self.burst * (tier == "draft" and not goes_on)
            spent += took
            if parts:
                parts[tier].counters.passed(LIVE, took, tokens, one_burst=tier == "draft" and goes_on)

        def propose(level: int) -> int:
            tier, below = plan.tiers[level], plan.tiers[level - 1] if level else ""
            if tier == "ngram":
                passed(tier, 1)
                return propose(level - 1) if level else 0
            held = 0
            while held < (*plan.gammas, 1)[level]:
                guesses = propose(level - 1) if level else 0
                guesser = "draft" if below == "ngram" and level > 1 else below
                kept = 0
                while kept < guesses and self.dice.random() < self.share(guesser):
                    kept += 1
                passed(tier, guesses + 1, goes_on=held > 0)
                if parts and guesses:
                    parts[guesser].counters.judged(np.array([guesses]), np.array([kept]), LIVE)
                held += kept + 1
            return held

        return propose(len(plan.tiers) - 1), spent


class Silence:
    """An echo of a world in which nothing repeats itself."""

    def __init__(self, world: World) -> None:
        self.of = world.echo

    def listen(self, prefix: object, b: int) -> tuple[int, int]:
        return 0, 0


def flown(it: PlanController, prefix: Any, world: World, proposals: int) -> float:
    """Tokens per second of a pilot in a world."""
    it._echo = Silence(world)  # type: ignore[assignment]
    tokens = seconds = 0.0
    for _ in range(proposals):
        it.steer(prefix, LIVE)
        new, took = world.play(it.plan, it._parts)
        it.learn([int(prefix.lengths_B[0])], new, took)
        tokens, seconds = tokens + new, seconds + took
    return tokens / seconds


def fixed(plan: Plan, world: World, proposals: int = 4000) -> float:
    """Tokens per second of one plan in a world, with dice of its own."""
    world = replace(world, dice=random.Random(7))
    tokens, seconds = (sum(each) for each in zip(*(world.play(plan) for _ in range(proposals)), strict=True))
    return tokens / seconds
