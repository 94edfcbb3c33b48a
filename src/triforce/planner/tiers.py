"""Tiers under a plan: put on top of each other as it says."""

from __future__ import annotations

from collections.abc import Mapping

from triforce.planner.plan import Plan
from triforce.ragged import Bools
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier
from triforce.speculation.ngram import FAR


def link(tiers: Mapping[str, Proposer], plan: Plan, before: Plan, prefix: SequenceState, live_B: Bools) -> None:
    """Put the tiers of a plan on top of each other, and set how many tokens each proposes.

    A tier that the plan `before` left out is prefilled with the rows of which it has missed more than a few tokens.
    """
    below: Proposer | None = None
    for name, gamma in zip(plan.tiers, (*plan.gammas, 1), strict=True):
        tier = tiers[name]
        tier.gamma = gamma
        if isinstance(tier, Tier):
            tier.below = below
            if name not in before.tiers:
                tier.catch_up(prefix, live_B & (prefix.lengths_B - tier.cache.lengths_B > FAR))
        elif isinstance(tier, NgramProposer):
            tier.below = below if isinstance(below, Tier) else None
        below = tier
