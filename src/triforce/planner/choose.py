"""Weighs plans against each other, against the one that is followed, and against plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from triforce.planner.fallback import SpeculationFallback
from triforce.planner.forecast import OTHER, Forecast
from triforce.planner.plan import Amount, Plan, rate

BETTER = 1.04  # times the present plan's worth: less is not worth a change
SAFE = 1.15, 1.04  # times the worth of plain decoding: less is not worth the risk of leaving it, and of staying away

PLAIN = Plan()


def choose(
    among: Iterable[tuple[tuple[str, ...], Sequence[Amount]]], world: Forecast, course: Plan, guard: SpeculationFallback
) -> tuple[Plan, float]:
    """The plan that is worth most, or the course if that is about as good; and its tokens per second of each row.

    among: tiers, and of each but the full one its gammas, entry n that of plan n. If the world has several budgets, the
    plans are of each of them.
    """
    plain = guard.off(False) / world.cost("full", 1)
    best, highest, present = PLAIN, plain, plain
    for tiers, gammas in among:
        if "ngram" in tiers and not world.echo(1, tiers[0] == "ngram")[2]:
            continue
        worth_KN = _worth(tiers, gammas, world, guard)
        if tiers == course.tiers:
            present = float(_worth(tiers, course.gammas, world, guard)[0, 0])
        k, at = divmod(int(worth_KN.argmax()), worth_KN.shape[1])
        if worth_KN[k, at] > highest:
            times = tuple(sorted(world.options[k].items())) if "retrieval" in tiers else ()
            best, highest = Plan(tiers, tuple(int(each[at]) for each in gammas), times), float(worth_KN[k, at])
    needed = SAFE[not course.plain] * plain
    if highest < needed:
        best, highest = PLAIN, plain
    if not best.plain and present > needed and highest < BETTER * present:
        best, highest = course, present
    return best, highest * OTHER ** len(best.times)


def _worth(tiers: tuple[str, ...], gammas: Sequence[Amount], world: Forecast, guard: SpeculationFallback) -> np.ndarray:
    """Of plans of these tiers, tokens per second as things proved so far, by budget and gammas."""
    worth_KN = np.atleast_2d(rate(tiers, tuple(gammas), world)) * guard.off(True)
    return worth_KN / world.caution if "retrieval" in tiers else worth_KN
