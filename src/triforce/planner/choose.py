"""Chooses among plans: each against the current one, and against plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from triforce.planner.fallback import SpeculationFallback
from triforce.planner.forecast import MIN_GAIN_OF_BUDGET, Forecast
from triforce.planner.plan import Amount, Plan, rate

MIN_GAIN = 1.04  # times the tokens per second of the current plan: a change has to promise more
MIN_GAIN_OVER_PLAIN = 1.15, 1.04  # times those of plain decoding: to leave it, and to stay away from it

PLAIN = Plan()


def best_plan(
    among: Iterable[tuple[tuple[str, ...], Sequence[Amount]]],
    forecast: Forecast,
    current: Plan,
    fallback: SpeculationFallback,
) -> tuple[Plan, float]:
    """The plan with most tokens per second of each row, or the current one if it is about as good; and its rate.

    among: tiers, and of each but the full one its gammas, entry n that of plan n. Plans are weighed with each budget of
    the forecast.
    """
    plain = fallback.correction(False) / forecast.cost("full", 1)
    best, highest, present = PLAIN, plain, plain
    for tiers, gammas in among:
        if "ngram" in tiers and not forecast.hindsight(1, tiers[0] == "ngram")[2]:
            continue
        rates_KN = _rates(tiers, gammas, forecast, fallback)
        if tiers == current.tiers:
            present = float(_rates(tiers, current.gammas, forecast, fallback)[0, 0])
        k, at = divmod(int(rates_KN.argmax()), rates_KN.shape[1])
        if rates_KN[k, at] > highest:
            factors = tuple(sorted(forecast.budgets[k].items())) if "retrieval" in tiers else ()
            best, highest = Plan(tiers, tuple(int(each[at]) for each in gammas), factors), float(rates_KN[k, at])
    needed = MIN_GAIN_OVER_PLAIN[not current.plain] * plain
    if highest < needed:
        best, highest = PLAIN, plain
    if not best.plain and present > needed and highest < MIN_GAIN * present:
        best, highest = current, present
    return best, highest * MIN_GAIN_OF_BUDGET ** len(best.budget_factors)


def _rates(
    tiers: tuple[str, ...], gammas: Sequence[Amount], forecast: Forecast, fallback: SpeculationFallback
) -> np.ndarray:
    """Tokens per second (K budgets, N plans) of plans of these tiers, corrected by what was measured."""
    rates_KN = np.atleast_2d(rate(tiers, tuple(gammas), forecast)) * fallback.correction(True)
    return rates_KN / forecast.required_gain if "retrieval" in tiers else rates_KN
