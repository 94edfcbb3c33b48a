"""The choice of a plan: the best of each choice of tiers among those that may be risked, and then the best of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from triforce.planner.forecast import BudgetFactors
from triforce.planner.plan import PLAIN, Estimates, Plan, plan_space, proposals
from triforce.planner.planner_config import CONFIG


class State(Enum):
    """Reasons for which a batch is decoded as it is."""

    PLAIN = "plain decoding promises most"
    SPECULATING = "the plan promises most"
    TRYING = "the plan may be best, too little was seen of it"
    GUARDED = "a plan promises more, but the text has lost what trials may lose"


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits of a choice: tokens left to come at most, and seconds that may be lost."""

    left: float
    headroom: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the tokens per second of each row to expect of it.

    score: the rate that it is chosen by, with some optimism; 0 where it risks more than may be lost.
    """

    plan: Plan
    rate: float
    score: float


def candidates(
    it: Estimates, draft: bool, sparse: bool, budgets: Sequence[BudgetFactors], limits: PlanLimits
) -> list[Candidate]:
    """The best plan of each choice of tiers, of those that may be risked; plain decoding is left out.

    draft: whether there is a draft model. sparse: whether the retrieval tier would see less than all.
    """
    space = plan_space(draft, sparse)
    tokens_KZN, seconds_KZN = proposals(space, it)
    _, rate_KN, upper_KN = (tokens_KZN / seconds_KZN).swapaxes(0, 1)
    risk_KN = seconds_KZN[:, 0] - tokens_KZN[:, 0] * it.full_W[1]
    allowed_KN = risk_KN <= max(0.0, limits.headroom)
    optimism = limits.left / (limits.left + CONFIG.optimism_tokens)
    score_KN = np.where(allowed_KN, rate_KN + optimism * (upper_KN - rate_KN), 0.0)
    unusual_K = np.array([len(factors) for factors in budgets])
    worth_KN = np.where(allowed_KN, rate_KN, 0.0) / CONFIG.budget_gain ** unusual_K[:, None]
    worth_KN[1:] /= CONFIG.switch_gain
    found = []
    for family in space.families[1:]:
        k, n = divmod(int(worth_KN[:, family].argmax()), family.stop - family.start)
        n += family.start
        if space.ngram_N[n] and not it.found_A[int(space.draft_N[n] == 0)]:
            continue
        plan = space.plans[n]
        if space.retrieval_N[n] and budgets[k]:
            plan = replace(plan, budget_factors=tuple(sorted(budgets[k].items())))
        found.append(Candidate(plan, float(rate_KN[k, n]), float(score_KN[k, n])))
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen plan, why, and the tokens per second of each row that it promises; 0: not known yet."""

    plan: Plan = PLAIN
    state: State = State.PLAIN
    rate: float = 0.0


def best(found: Sequence[Candidate], present: Plan, plain: float) -> Choice:
    """The best of these plans that may be followed, or plain decoding, which has so many tokens per second.

    The tiers of the present plan are kept where others promise little more.
    """
    first = max(found, key=lambda each: each.score, default=None)
    needed = CONFIG.leave_gain if present.plain else CONFIG.switch_gain
    if first is None or first.score < needed * plain:
        promised = any(each.rate > CONFIG.switch_gain * plain for each in found)
        return Choice(PLAIN, State.GUARDED if promised else State.PLAIN, plain)
    same = next((each for each in found if each.plan.tiers == present.tiers), None)
    if same and same.score * CONFIG.switch_gain > first.score:
        first = same
    return Choice(first.plan, State.SPECULATING if first.rate > plain else State.TRYING, first.rate)
