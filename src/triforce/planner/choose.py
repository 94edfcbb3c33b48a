"""The choice of a plan: the best of each choice of tiers among those that may be risked, and then the best of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from triforce.planner.pass_costs import FULL
from triforce.planner.plan import PLAIN, BudgetFactors, Estimates, Plan, plan_space, proposals
from triforce.planner.planner_config import CONFIG

NOT_ALLOWED = 1e-9
"""Part of its rate that a plan is worth which may not be risked: told of, where no plan of its tiers may."""


class State(Enum):
    """Reasons for which a batch is decoded as it is."""

    FIRST = "plain decoding comes first, until another plan promises more"
    PLAIN = "no plan that may be risked promises enough more than plain decoding"
    SPECULATING = "the plan promises most"
    TRYING = "the plan may be best, too little was seen of it"
    GUARDED = "plans promise more, but risk more than the text may lose"
    PROBING = "to see again what plain decoding costs"


class Cause(Enum):
    """Reasons for which plans are weighed."""

    TIME = "it was time"
    LOSS = "the plan before lost"
    REPEATS = "n-grams foretold the text"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the tokens per second of each row to expect of it; 0: not known yet.

    score: the rate that it is chosen by, with some optimism; 0 where it risks more than may be lost.
    """

    plan: Plan = PLAIN
    rate: float = 0.0
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice(Candidate):
    """A chosen plan, and why. rival: the best plan of other tiers."""

    state: State = State.FIRST
    rival: Candidate | None = None
    cause: Cause = Cause.TIME


def candidates(
    it: Estimates, draft: bool, sparse: bool, budgets: Sequence[BudgetFactors], left: float, headroom: float
) -> list[Candidate]:
    """The best plan of each choice of tiers, of those that may be risked, and plain decoding first.

    draft: whether there is a draft model. sparse: whether the retrieval tier would see less than all. budgets: the
    present one first. left: tokens to come at most. headroom: seconds that may be lost.
    """
    space = plan_space(draft, sparse)
    tokens_KZN, seconds_KZN = proposals(space, it)
    _, rate_KN, upper_KN = (tokens_KZN / seconds_KZN).swapaxes(0, 1)
    risk_KN = seconds_KZN[:, 0] - tokens_KZN[:, 0] * it.seconds_KW[FULL][0, 1]
    allowed_KN = risk_KN <= max(0.0, headroom)
    optimism = left / (left + CONFIG.optimism_tokens)
    score_KN = np.where(allowed_KN, rate_KN + optimism * (upper_KN - rate_KN), 0.0)
    needed_K = CONFIG.budget_gain ** np.array([len(factors) for factors in budgets])
    needed_K[1:] *= CONFIG.switch_gain
    worth_KN = np.where(allowed_KN, 1.0, NOT_ALLOWED) * rate_KN / needed_K[:, None]
    found = []
    for family in space.families:
        k, n = np.unravel_index(worth_KN[:, family].argmax(), worth_KN[:, family].shape)
        plan = space.plans[family][n]
        if "retrieval" in plan.tiers:
            plan = replace(plan, budget_factors=budgets[int(k)])
        found.append(Candidate(plan, float(rate_KN[k, family][n]), float(score_KN[k, family][n])))
    return found


def best(found: Sequence[Candidate], present: Plan) -> Choice:
    """The best of these plans that may be followed; the first one is plain decoding.

    The tiers of the present plan are kept where others promise little more.
    """
    plain, *others = found
    needed = CONFIG.leave_gain if present.plain else CONFIG.switch_gain
    kept = {present.tiers: CONFIG.switch_gain}
    chosen = max(others, key=lambda each: each.score * kept.get(each.plan.tiers, 1.0))
    state = State.SPECULATING if chosen.rate > plain.rate else State.TRYING
    if max(each.score for each in others) < needed * plain.rate:
        guarded = any(not each.score and each.rate > needed * plain.rate for each in others)
        chosen, state = plain, State.GUARDED if guarded else State.PLAIN
    rival = max((each for each in found if each is not chosen), key=lambda each: each.score)
    return Choice(chosen.plan, chosen.rate, chosen.score, state, rival)
