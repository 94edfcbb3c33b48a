"""Beliefs about tiers: learnt from their counters, and given as estimates with a lower and an upper bound.

Rows of one size (the bits of their token counts) share an acceptance of the retrieval tier and a budget. For the rows
of each size, a plan may have this tier read half or twice the default budget. One weighing changes the budget of at
most one size. Tiers and gammas are the same for all rows. Shape suffixes are those of `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.cost_model import AcceptanceTracker, CostModel, NgramHindsight
from triforce.planner.plan import PLAIN, BudgetFactors, Estimates, Plan, plan_space, proposals
from triforce.planner.planner_config import AMONG_MODELS, CONFIG, FULL, READING
from triforce.ragged import Ints
from triforce.speculation import NgramProposer

MAX_PASSES_FOR_MIN = 3
"""If a kind has at most this number of passes, the fastest counts, as interruptions make passes slower; else the
median."""
BUDGET_STEPS = 0.5, 1.0, 2.0  # factors of the default budget
MIN_SPARSITY = 2  # least ratio of a context to a budget other than the default one
READING_WIDTH = 64
"""Tokens of the pass by which the seconds of a draft's reading are estimated."""
WIDEST = 33  # upper bound of the tokens of a row in a pass of any plan


def budget_options(view: RetrievalView, lengths: Sequence[int]) -> list[BudgetFactors]:
    """Return options for the budgets of all sizes of rows, the present budgets first.

    If the planner chooses budgets, each further option moves the budget of one size by one step.
    """
    sizes = sorted({length.bit_length() for length in lengths})
    budget = view.setting.budget
    present = {bits: view.budget_factors[bits] for bits in sizes if bits in view.budget_factors}
    options = [present]
    if budget.adjustable and view.setting.refresh == 1 and not view.full.pool.offloaded:
        for bits in sizes:
            min_context = 1 << (bits - 1)
            step = BUDGET_STEPS.index(present.get(bits, 1.0))
            for factor in (*BUDGET_STEPS[max(0, step - 1) : step], *BUDGET_STEPS[step + 1 : step + 2]):
                if factor == 1.0 or budget.of(min_context, factor) * MIN_SPARSITY <= min_context:
                    options.append({**present, bits: factor})
    return [tuple((bits, factors[bits]) for bits in sizes if factors.get(bits, 1.0) != 1.0) for factors in options]


class Beliefs:
    """Knowledge of the tiers of one batch, by name. temperature: the mean of its rows."""

    def __init__(self, tiers: Mapping[str, Any], costs: CostModel, temperature: float) -> None:
        self.tiers = tiers
        self.costs = costs
        self.view: RetrievalView = tiers["retrieval"].cache
        self.acceptance = AcceptanceTracker(costs.acceptance, temperature)
        self.hindsight = NgramHindsight(tiers["ngram"])

    def learn_passes(self, plan: Plan, lengths: Sequence[int], seconds: float) -> float:
        """Learn the cost of passes from pending proposals. seconds: of the proposals, with the time between passes.

        Returns the expected seconds of these passes. The account limits the measured seconds to `CONFIG.outlier` times
        these, so an interruption of the machine counts little against the plan.
        """
        passes = [(name, *record) for name in plan.tiers for record in self.tiers[name].counters.new_passes()]
        gap_seconds = max(0.0, seconds - sum(pass_seconds for *_, pass_seconds in passes)) / max(1, len(passes))
        seconds_by_kind: dict[tuple[str, int, int], list[float]] = {}
        for tier, width, rows, pass_seconds in passes:
            seconds_by_kind.setdefault((tier, width, rows), []).append(pass_seconds + gap_seconds)
        among_models = bool({*plan.tiers} - {FULL, "ngram"})
        expected_seconds = 0.0
        # Keys of all rows. Those of the draft count as 0: it always reads its whole window, so its measured seconds
        # include that constant.
        keys_of = {FULL: sum(lengths), "retrieval": sum(map(self.view.keys_read, lengths))}
        for (tier, width, rows), kind_seconds in seconds_by_kind.items():
            keys = rows * keys_of.get(tier, 0) / len(lengths)
            name = AMONG_MODELS if tier == FULL and among_models else tier
            pass_seconds = median(kind_seconds) if len(kind_seconds) > MAX_PASSES_FOR_MIN else min(kind_seconds)
            expected_seconds += len(kind_seconds) * self.costs.passes.observe(
                name, width, rows, keys, pass_seconds, len(kind_seconds)
            )
        return expected_seconds

    def reading_seconds(self, tokens: int) -> float:
        """Return the expected seconds in which the draft reads `tokens` tokens."""
        return tokens * self.costs.passes.seconds(READING, READING_WIDTH, 1, 0) / READING_WIDTH

    def learn_verdicts(self, plan: Plan, lengths_B: Ints, proposals: int) -> None:
        """Learn each tier's acceptance from the counters of `proposals` proposals.

        Verdicts on the retrieval tier are grouped by the bits of the rows' lengths.
        """
        self.acceptance.fade(proposals)
        bits_B = np.array([length.bit_length() for length in lengths_B.tolist()])
        for name in plan.tiers[:-1]:
            tier = self.tiers[name]
            verdicts_B3 = self.tiers[name].counters.new_verdicts()
            for bits in set(bits_B.tolist()) if name == "retrieval" else (0,):
                accepted, rejected, proposed = verdicts_B3[(bits == 0) | (bits_B == bits)].sum(0).tolist()
                if isinstance(tier, NgramProposer):  # relative to what hindsight predicted
                    rejected = max(0.0, proposed * self._predicted_acceptance(tier) - accepted)
                factor = self.view.budget_factors.get(bits, 1.0)
                self.acceptance.add(name, (1 << bits) - 1, accepted, rejected, factor)

    def estimates(self, lengths: Sequence[int], caution: float, budgets: Sequence[BudgetFactors] = ((),)) -> Estimates:
        """Return the estimates for rows of these lengths, with each of these budgets of the retrieval tier.

        caution: distance of the lower bound of acceptance from its mean, in standard deviations.
        """
        bounds_Z = np.array([-caution, 0.0, CONFIG.optimism])
        rows, keys_K, accepted_KZ = len(lengths), *self._retrieval(lengths, budgets, bounds_Z)
        keys = {FULL: [sum(lengths)], AMONG_MODELS: [sum(lengths)], "retrieval": keys_K, "draft": [0], "ngram": [0]}
        seconds_KW = {
            tier: self.costs.passes.table(tier, rows, tier_keys_K, WIDEST) for tier, tier_keys_K in keys.items()
        }
        accepted = {tier: self._bounds(tier, max(lengths), bounds_Z)[None] for tier in ("draft", "ngram")}
        return Estimates(rows, seconds_KW, {**accepted, "retrieval": accepted_KZ}, self.hindsight.odds())

    def _predicted_acceptance(self, ngrams: NgramProposer) -> float:
        """Return the share of the n-grams' tokens that hindsight predicts to be accepted, with their present gamma."""
        return self.hindsight.odds().acceptance(int(ngrams.below is None), ngrams.gamma)

    def _bounds(self, tier: str, length: int, bounds_Z: np.ndarray, factor: float = 1.0) -> np.ndarray:
        mean, deviation = self.acceptance.estimate(tier, length, factor)
        return np.clip(mean + bounds_Z * deviation, 0, 1)

    def _retrieval(
        self, lengths: Sequence[int], budgets: Sequence[BudgetFactors], bounds_Z: np.ndarray
    ) -> tuple[list[int], np.ndarray]:
        """Return the keys that the rows read in all, by budget, and the retrieval tier's acceptance (K, Z)."""
        bits_by_row = [length.bit_length() for length in lengths]
        means = {
            bits: sum(n for n in lengths if n.bit_length() == bits) // bits_by_row.count(bits) for bits in bits_by_row
        }
        keys_K = [0] * len(budgets)
        accepted_KZ = np.zeros((len(budgets), len(bounds_Z)))
        for k, factors in enumerate(map(dict, budgets)):
            for bits, mean in means.items():
                rows = bits_by_row.count(bits)
                factor = factors.get(bits, 1.0)
                keys_K[k] += rows * self.view.keys_read(mean, budget=self.view.setting.budget.of(mean, factor))
                accepted_KZ[k] += rows / len(lengths) * self._bounds("retrieval", mean, bounds_Z, factor)
        return keys_K, accepted_KZ


FORBIDDEN_WEIGHT = 1e-9
"""Factor of the rate of a plan that risks more than the headroom. `candidates` returns such a plan for its set of tiers
only if the set has no allowed plan."""


class TokensToCome(NamedTuple):
    """Tokens that are still to come: the most of one text, and a number to expect, the mean of all texts."""

    most: int
    expected: float

    @staticmethod
    def of(texts: Sequence[tuple[int, int]]) -> TokensToCome:
        """Return the tokens to come in texts, each given by its tokens so far and their limit.

        The length of a text is unknown: it is expected to go on for as long as it is, and for `CONFIG.credit_tokens`
        more.
        """
        expected = [min(limit - tokens, tokens + CONFIG.credit_tokens) for tokens, limit in texts]
        return TokensToCome(max(limit - tokens for tokens, limit in texts), sum(expected) / len(expected))


UNKNOWN_LENGTH = TokensToCome(10**6, 10**6)
"""Tokens still to come, if the caller gives no number."""


class State(Enum):
    """Reasons for the present plan of a batch."""

    FIRST = "plain decoding comes first, until another plan promises more"
    PLAIN = "no plan within the headroom promises enough gain over plain decoding"
    SPECULATING = "the plan promises most"
    """Tiers in use stay as long as no other promises more than `CONFIG.switch_gain` times as much."""
    TRYING = "the plan may be best, but its mean estimate is not above plain decoding"
    GUARDED = "plans promise more, but risk more than the text may lose"
    PROBING = "plain decoding is measured again, or goes on until the tiers of the chosen plan are ready"
    """The retrieval tier needs a proposal that observes attention, and a draft model has to read the text."""


class Cause(Enum):
    """Causes of weighing plans."""

    TIME = "the next weighing was due"
    LOSS = "the previous plan lost time"
    REPEATS = "n-grams predicted the text"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and its expected rate in tokens per second of each row; 0: not known yet.

    score: the rate with some optimism, by which plans of different tiers are compared; 0 where the plan risks more than
    the headroom.
    """

    plan: Plan = PLAIN
    rate: float = 0.0
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice(Candidate):
    """A chosen plan.

    state: why this plan was chosen. cause: why plans were weighed. rival: the best plan of other tiers.
    """

    state: State = State.FIRST
    rival: Candidate | None = None
    cause: Cause = Cause.TIME


def candidates(
    estimates: Estimates,
    draft: bool,
    sparse: bool,
    budgets: Sequence[BudgetFactors],
    to_come: TokensToCome,
    headroom: float,
    reading_seconds: float = 0.0,
) -> list[Candidate]:
    """Return the best plan of each set of tiers, plain decoding first: by mean rate, less a handicap of other budgets.

    Plans that risk more than the headroom count only where a set has no other, and have a score of 0. A plan risks the
    seconds that one proposal loses to plain decoding at the lower bound of acceptance.

    draft: there is a draft model. sparse: the retrieval tier would see less than the whole context. budgets: the
    present one first. headroom: seconds that may be lost. reading_seconds: the time in which the draft reads the texts;
    the expected tokens to come share it.
    """
    space = plan_space(draft, sparse)
    tokens_KZN, seconds_KZN = proposals(space, estimates)
    _, rate_KN, upper_KN = (tokens_KZN / seconds_KZN).swapaxes(0, 1)
    risk_KN = seconds_KZN[:, 0] - tokens_KZN[:, 0] * estimates.seconds_KW[FULL][0, 1]
    allowed_KN = risk_KN <= max(0.0, headroom)
    optimism = to_come.most / (to_come.most + CONFIG.optimism_tokens)
    reading_per_token = reading_seconds / max(1.0, to_come.expected)
    score_KN = np.where(allowed_KN, rate_KN + optimism * (upper_KN - rate_KN), 0.0)
    needed_K = CONFIG.budget_gain ** np.array([len(factors) for factors in budgets])
    needed_K[1:] *= CONFIG.switch_gain
    worth_KN = np.where(allowed_KN, 1.0, FORBIDDEN_WEIGHT) * rate_KN / needed_K[:, None]
    options = []
    for family in space.families:
        k, n = np.unravel_index(worth_KN[:, family].argmax(), worth_KN[:, family].shape)
        plan = space.plans[family][n]
        if "retrieval" in plan.tiers:
            plan = replace(plan, budget_factors=budgets[int(k)])
        delay = reading_per_token if "draft" in plan.tiers else 0.0
        rates = (rate_KN[k, family][n], score_KN[k, family][n])
        options.append(Candidate(plan, *(float(rate / (1 + delay * rate)) for rate in rates)))
    return options


def best(options: Sequence[Candidate], present: Plan) -> Choice:
    """Return the plan with the highest score among `options`. The first option is plain decoding.

    The tiers of the present plan stay if others score less than `CONFIG.switch_gain` times as much. Plain decoding is
    chosen if no score reaches its rate times `CONFIG.leave_gain`, or `CONFIG.switch_gain` if the present plan
    speculates. Gammas of the present tiers change without a margin, because plans of the same tiers share the estimates
    of acceptance, and no tier has to catch up.
    """
    plain, *speculative = options
    min_gain = CONFIG.leave_gain if present.plain else CONFIG.switch_gain
    tier_gain = {present.tiers: CONFIG.switch_gain}
    chosen = max(speculative, key=lambda option: option.score * tier_gain.get(option.plan.tiers, 1.0))
    state = State.SPECULATING if chosen.rate > plain.rate else State.TRYING
    if max(option.score for option in speculative) < min_gain * plain.rate:
        guarded = any(not option.score and option.rate > min_gain * plain.rate for option in speculative)
        chosen = plain
        state = State.GUARDED if guarded else State.PLAIN
    rival = max((option for option in options if option is not chosen), key=lambda option: option.score)
    return Choice(chosen.plan, chosen.rate, chosen.score, state, rival)
