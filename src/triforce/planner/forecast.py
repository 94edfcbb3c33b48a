"""Beliefs about tiers: learnt from their counters, and told as forecasts with a lower and an upper bound.

Rows are grouped by the bits of their lengths, as acceptance is. A plan may have the retrieval tier read half or twice
the usual budget for the rows of one group; tiers and gammas are those of all rows. Shape suffixes are those of `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import Any

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.cost_model import AcceptanceTracker, CostModel, NgramHindsight
from triforce.planner.plan import PLAIN, BudgetFactors, Estimates, Plan, plan_space, proposals
from triforce.planner.planner_config import AMONG_MODELS, CONFIG, FULL
from triforce.ragged import Ints
from triforce.speculation import NgramProposer

FEW = 3  # passes of which the fastest one counts: what interrupts a pass makes it slower
BUDGET_STEPS = 0.5, 1.0, 2.0  # times the usual budget that may be read
MIN_SPARSITY = 2  # times as long as another budget than the usual one a context is, at least
WIDEST = 33  # tokens of the widest pass of a plan


def budget_options(view: RetrievalView, lengths: Sequence[int]) -> list[BudgetFactors]:
    """The present budgets, and all that differ by one step for one group of rows, where budgets are to be chosen."""
    groups = sorted({length.bit_length() for length in lengths})
    budget = view.setting.budget
    now = {bits: view.budget_factors[bits] for bits in groups if bits in view.budget_factors}
    found = [now]
    if budget.open and view.setting.refresh == 1 and not view.full.pool.offloaded:
        for bits in groups:
            least = 1 << (bits - 1)
            at = BUDGET_STEPS.index(now.get(bits, 1.0))
            for factor in (*BUDGET_STEPS[max(0, at - 1) : at], *BUDGET_STEPS[at + 1 : at + 2]):
                if factor == 1.0 or budget.of(least, factor) * MIN_SPARSITY <= least:
                    found.append({**now, bits: factor})
    return [tuple((bits, each[bits]) for bits in groups if each.get(bits, 1.0) != 1.0) for each in found]


class Beliefs:
    """Knowledge of the tiers of one batch, by name. temperature: the mean of its rows."""

    def __init__(self, tiers: Mapping[str, Any], costs: CostModel, temperature: float) -> None:
        self.tiers = tiers
        self.costs = costs
        self.view: RetrievalView = tiers["retrieval"].cache
        self.acceptance = AcceptanceTracker(costs.acceptance, temperature)
        self.hindsight = NgramHindsight(tiers["ngram"])

    def learn_passes(self, plan: Plan, lengths: Sequence[int], seconds: float) -> float:
        """Learn what passes cost from proposals that took so many seconds: the time between passes is theirs, too.

        Returns the seconds that such passes usually take: a machine that did something else is no fault of the plan.
        """
        passes = [(name, *each) for name in plan.tiers for each in self.tiers[name].counters.new_passes()]
        between = max(0.0, seconds - sum(took for *_, took in passes)) / max(1, len(passes))
        alike: dict[tuple[str, int, int], list[float]] = {}
        for tier, width, rows, took in passes:
            alike.setdefault((tier, width, rows), []).append(took + between)
        among = bool({*plan.tiers} - {FULL, "ngram"})
        usual = 0.0
        # Keys of all rows; a draft's window is part of what each of its passes reads.
        keys_of = {FULL: sum(lengths), "retrieval": sum(map(self.view.keys, lengths))}
        for (tier, width, rows), some in alike.items():
            keys = rows * keys_of.get(tier, 0) / len(lengths)
            name = AMONG_MODELS if tier == FULL and among else tier
            took = median(some) if len(some) > FEW else min(some)
            usual += len(some) * self.costs.passes.observe(name, width, rows, keys, took, len(some))
        return usual

    def learn_verdicts(self, plan: Plan, lengths_B: Ints, proposals: int) -> None:
        """Learn how many draft tokens of each tier some proposals accepted: of retrieval by the size of rows."""
        self.acceptance.fade(proposals)
        bits_B = np.array([length.bit_length() for length in lengths_B.tolist()])
        for name in plan.tiers[:-1]:
            tier = self.tiers[name]
            news_B3 = self.tiers[name].counters.new_verdicts()
            for bits in set(bits_B.tolist()) if name == "retrieval" else (0,):
                accepted, rejected, proposed = news_B3[(bits == 0) | (bits_B == bits)].sum(0).tolist()
                if isinstance(tier, NgramProposer):  # of what hindsight expected
                    rejected = max(0.0, proposed * self._accepted(tier) - accepted)
                factor = self.view.budget_factors.get(bits, 1.0)
                self.acceptance.add(name, (1 << bits) - 1, accepted, rejected, factor)

    def estimates(self, lengths: Sequence[int], caution: float, budgets: Sequence[BudgetFactors] = ((),)) -> Estimates:
        """Return what is believed of rows of these lengths, with each of these budgets of the retrieval tier.

        caution: standard deviations that the lower bound of acceptance is below its mean.
        """
        bounds_Z = np.array([-caution, 0.0, CONFIG.optimism])
        rows, keys_K, accepted_KZ = len(lengths), *self._retrieval(lengths, budgets, bounds_Z)
        keys = {FULL: [sum(lengths)], AMONG_MODELS: [sum(lengths)], "retrieval": keys_K, "draft": [0], "ngram": [0]}
        seconds_KW = {tier: self.costs.passes.table(tier, rows, each_K, WIDEST) for tier, each_K in keys.items()}
        accepted = {tier: self._bounds(tier, max(lengths), bounds_Z)[None] for tier in ("draft", "ngram")}
        return Estimates(rows, seconds_KW, {**accepted, "retrieval": accepted_KZ}, self.hindsight.odds())

    def _accepted(self, ngrams: NgramProposer) -> float:
        """The part of what n-grams propose now that hindsight expects to be accepted."""
        return self.hindsight.odds().acceptance(int(ngrams.below is None), ngrams.gamma)

    def _bounds(self, tier: str, length: int, bounds_Z: np.ndarray, factor: float = 1.0) -> np.ndarray:
        mean, deviation = self.acceptance.of(tier, length, factor)
        return np.clip(mean + bounds_Z * deviation, 0, 1)

    def _retrieval(
        self, lengths: Sequence[int], budgets: Sequence[BudgetFactors], bounds_Z: np.ndarray
    ) -> tuple[list[int], np.ndarray]:
        """Keys that all rows read, by budget, and the retrieval tier's acceptance."""
        bits = [length.bit_length() for length in lengths]
        means = {each: sum(n for n in lengths if n.bit_length() == each) // bits.count(each) for each in bits}
        keys_K = [0] * len(budgets)
        accepted_KZ = np.zeros((len(budgets), len(bounds_Z)))
        for k, factors in enumerate(map(dict, budgets)):
            for each, mean in means.items():
                rows = bits.count(each)
                factor = factors.get(each, 1.0)
                keys_K[k] += rows * self.view.keys(mean, budget=self.view.setting.budget.of(mean, factor))
                accepted_KZ[k] += rows / len(lengths) * self._bounds("retrieval", mean, bounds_Z, factor)
        return keys_K, accepted_KZ


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
        chosen = plain
        state = State.GUARDED if guarded else State.PLAIN
    rival = max((each for each in found if each is not chosen), key=lambda each: each.score)
    return Choice(chosen.plan, chosen.rate, chosen.score, state, rival)
