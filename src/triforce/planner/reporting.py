"""Reporting what a controller believes, for `triforce explain`: nothing is computed that it had not computed before."""

from __future__ import annotations

from triforce.interface.stats import PlanReport, TierBelief, WeighedPlan
from triforce.planner.controller import PlanController
from triforce.planner.pass_costs import FULL

WIDE = 8  # tokens of the wide pass whose cost is told


def report(it: PlanController) -> PlanReport | None:
    """Return what it believed when it last weighed plans; None if it never did, or nothing was proposed."""
    if it.estimates is None or not it.lengths:
        return None
    beliefs = []
    for name, seconds_KW in it.estimates.seconds_KW.items():
        tier, (narrow, wide) = name.split()[0], (1000 * seconds_KW[0, [1, WIDE]]).tolist()
        longest = max(it.lengths)
        factor = it.times.get(longest.bit_length(), 1.0) if tier == "retrieval" else 1.0
        mean, deviation = (None, 0.0) if tier == FULL else it.beliefs.acceptance.of(tier, longest, factor)
        if tier in it.by_name:
            passes, tokens = it.costs.passes.of(name).count, it.beliefs.acceptance.tokens(tier)
            beliefs.append(TierBelief(name, (narrow, wide), passes, mean, deviation, tokens))
    weighed = [WeighedPlan(str(each.plan), each.rate, each.score) for each in it.found]
    return PlanReport(beliefs, weighed, it.account.won, it.account.headroom)
