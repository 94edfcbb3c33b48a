"""Reporting what a controller believes, for `triforce explain`: nothing is computed that it had not computed before."""

from __future__ import annotations

from triforce.interface.stats import PlanReport, TierBelief
from triforce.planner.controller import PlanController
from triforce.planner.plan import PLAIN

WIDE = 8  # tokens of the wide pass whose cost is told


def report(it: PlanController) -> PlanReport | None:
    """Return what it believed when it last weighed plans; None if it never did, or nothing was proposed."""
    if it.estimates is None or not it.lengths:
        return None
    beliefs, seen = [], it.estimates
    seconds = {"full": seen.full_W, "retrieval": seen.retrieval_KW[0], "draft": seen.draft_G, "ngram": [seen.ngram]}
    for name in it.by_name:
        narrow, wide = (seconds[name][min(tokens, len(seconds[name]) - 1)] for tokens in (1, WIDE))
        known = None if name == "full" else it.acceptance.of(name, max(it.lengths))
        mean, deviation = known or (None, 0.0)
        passes, tokens = it.costs.passes.of(name).count, it.acceptance.tokens(name)
        beliefs.append(TierBelief(name, (1000 * float(narrow), 1000 * float(wide)), passes, mean, deviation, tokens))
    best = max(it.found, key=lambda each: each.rate, default=None)
    speculates = best is not None and best.rate > it.plain
    plan, rate = (best.plan, best.rate) if best and speculates else (PLAIN, it.plain)
    return PlanReport(beliefs, str(plan), rate, it.plain, it.account.won)
