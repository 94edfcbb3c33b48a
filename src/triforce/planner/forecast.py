"""Forecasts: what each plan would give and cost by the beliefs of now, with a lower and an upper bound.

Rows are grouped by the bits of their lengths, as acceptance is. A plan may have the retrieval tier read half or twice
the usual budget for the rows of one group; tiers and gammas are those of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cost_model import CostModel
from triforce.planner.plan import Amount, Plan, families, proposal
from triforce.planner.planner_config import CONFIG

BUDGET_STEPS = 0.5, 1.0, 2.0  # times the usual budget that may be read
MIN_SPARSITY = 2  # times as long as another budget than the usual one a context is, at least
WIDEST = 33  # tokens of the widest pass of a plan
BOUNDS = np.array([-CONFIG.caution, 0.0, CONFIG.optimism])
"""Standard deviations from the mean: the rows of amounts that depend on acceptance, for each budget."""

BudgetFactors = Mapping[int, float]
"""Times the usual budget, by the bits of a row's length; 1 where it is left out."""


def budget_options(view: RetrievalView, present: BudgetFactors, lengths: Sequence[int]) -> list[dict[int, float]]:
    """The present budgets, and all that differ by one step for one group of rows, where budgets are to be chosen."""
    sizes = sorted({length.bit_length() for length in lengths})
    present = {bits: present[bits] for bits in sizes if bits in present}
    found = [present]
    if not (view.setting.budget.open and view.setting.refresh == 1 and not view.full.pool.offloaded):
        return found
    for bits in sizes:
        least = 1 << (bits - 1)
        allowed = least // MIN_SPARSITY
        possible = [each for each in BUDGET_STEPS if each == 1.0 or view.setting.budget.of(least, each) <= allowed]
        at = possible.index(present.get(bits, 1.0))
        for other in possible[max(0, at - 1) : at] + possible[at + 1 : at + 2]:
            changed = {**present, bits: other}
            found.append({size: each for size, each in changed.items() if each != 1.0})
    return found


def keys_read(tier: str, lengths: Sequence[int], view: RetrievalView) -> int:
    """Keys that a pass of a tier reads, of all rows; the draft's window is part of what each of its passes reads."""
    return sum(lengths) if tier == "full" else sum(map(view.keys, lengths)) if tier == "retrieval" else 0


@dataclass(frozen=True, slots=True)
class Beliefs:
    """All that forecasts are made of."""

    costs: CostModel
    acceptance: AcceptanceTracker
    hindsight: NgramHindsight
    view: RetrievalView


class Forecast:
    """`TierEstimates` for rows of these lengths. Amounts are columns: for each budget, a row for each of `BOUNDS`."""

    def __init__(self, beliefs: Beliefs, lengths: Sequence[int], budgets: Sequence[BudgetFactors] = ({},)) -> None:
        self.rows, self.beliefs, self.budgets, self._lengths = len(lengths), beliefs, budgets, lengths
        self._repeats = 1  # of the bounds, for budgets
        self._tables: dict[str, np.ndarray] = {}
        self._accepted: dict[str, Amount] = {}

    def cost(self, tier: str, tokens: Amount) -> Amount:
        if tier not in self._tables:
            self._tables[tier] = self._table(tier)
        table_KW = self._tables[tier]
        at: Amount = 0 if len(table_KW) == 1 else np.repeat(np.arange(len(table_KW)), len(BOUNDS))[:, None]
        low = np.clip(np.asarray(tokens, int), 1, WIDEST - 1)
        less, more = table_KW[at, low - 1], table_KW[at, low]
        return less + (tokens - low) * (more - less)

    def _table(self, tier: str) -> np.ndarray:
        """Seconds of a pass (K budgets, or one; `WIDEST` widths)."""
        keys = self._retrieval[0] if tier == "retrieval" else [keys_read(tier, self._lengths, self.beliefs.view)]
        width_KW, keys_KW = np.meshgrid(np.arange(1.0, WIDEST + 1), np.array(keys, float))
        seconds_KW: np.ndarray = self.beliefs.costs.passes.seconds(tier, width_KW, self.rows, keys_KW)
        return seconds_KW

    def draft_cost(self, tier: str, tokens: Amount) -> Amount:
        return self.cost(tier, tokens) if tier == "draft" else tokens * self.cost(tier, 1)

    def hindsight(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        proposed, accepted, found = self.beliefs.hindsight.of(gamma, alone)
        trust = self.acceptance("ngram")
        return trust * proposed, trust * accepted, float(np.ravel(trust)[1]) * found

    def acceptance(self, tier: str) -> Amount:
        if tier == "full":
            return 1.0
        if tier == "retrieval":
            return self._retrieval[1]
        if tier not in self._accepted:
            mean, deviation = self.beliefs.acceptance.of(tier, max(self._lengths))
            self._accepted[tier] = np.clip(mean + BOUNDS * deviation, 0, 1)[:, None]
        return np.tile(self._accepted[tier], (self._repeats, 1)) if self._repeats > 1 else self._accepted[tier]

    def proposals(self, tiers: tuple[str, ...], gammas: Sequence[Amount]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and seconds of one proposal (K budgets, 3 `BOUNDS`, N plans); the upper bound is the last one."""
        self._repeats = len(self.budgets) if "retrieval" in tiers else 1
        shape = self._repeats * len(BOUNDS), len(gammas[0])
        tokens_RN, seconds_RN = (np.broadcast_to(each, shape) for each in proposal(tiers, tuple(gammas), self))
        apart = self._repeats, len(BOUNDS), len(gammas[0])
        return tokens_RN.reshape(apart), seconds_RN.reshape(apart)

    @cached_property
    def _retrieval(self) -> tuple[list[int], Amount]:
        """Keys that all rows read, by budget, and the column of acceptance."""
        sizes: dict[int, list[int]] = {}
        for length in self._lengths:
            sizes.setdefault(length.bit_length(), []).append(length)
        means = {bits: (len(some), sum(some) // len(some)) for bits, some in sizes.items()}
        view, reads, column = self.beliefs.view, [], []
        for factors in self.budgets:
            keys, accepted = 0, np.zeros(len(BOUNDS))
            for bits, (count, mean) in means.items():
                factor = factors.get(bits, 1.0)
                keys += count * view.keys(mean, budget=view.setting.budget.of(mean, factor))
                share, deviation = self.beliefs.acceptance.of("retrieval", mean, factor)
                accepted += count / self.rows * np.clip(share + BOUNDS * deviation, 0, 1)
            reads.append(keys)
            column.append(accepted)
        return reads, np.concatenate(column)[:, None]


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits of a choice: tokens left to come at most, seconds that may be lost, seconds of a plain step."""

    left: float
    headroom: float
    plain: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the tokens per second of each row to expect of it.

    score: the rate that it is chosen by, with some optimism; 0 where it risks more than may be lost. risk: seconds that
    a proposal loses to plain decoding at the lower bound.
    """

    plan: Plan
    rate: float
    score: float
    risk: float


def candidates(forecast: Forecast, draft: bool, sparse: bool, limits: PlanLimits) -> list[Candidate]:
    """The best plan of each choice of tiers, of those that may be risked.

    draft: whether there is a draft model. sparse: whether the retrieval tier would see less than all.
    """
    found = []
    optimism = limits.left / (limits.left + CONFIG.optimism_tokens)
    for tiers, gammas in families(draft, sparse):
        if "ngram" in tiers and not forecast.hindsight(1, tiers[0] == "ngram")[2]:
            continue
        tokens_KZN, seconds_KZN = forecast.proposals(tiers, gammas)
        _, rate_KN, upper_KN = (tokens_KZN / seconds_KZN).swapaxes(0, 1)
        risk_KN = seconds_KZN[:, 0] - tokens_KZN[:, 0] * limits.plain
        allowed_KN = risk_KN <= max(0.0, limits.headroom)
        score_KN = np.where(allowed_KN, rate_KN + optimism * (upper_KN - rate_KN), 0.0)
        unusual_K1 = np.array([[len(factors)] for factors in forecast.budgets[: len(rate_KN)]])
        worth_KN = np.where(allowed_KN, rate_KN, 0.0) / CONFIG.budget_gain**unusual_K1
        worth_KN[1:] /= CONFIG.switch_gain
        k, n = divmod(int(worth_KN.argmax()), len(gammas[0]))
        factors = tuple(sorted(forecast.budgets[k].items())) if "retrieval" in tiers else ()
        plan = Plan(tiers, tuple(int(each[n]) for each in gammas), factors)
        found.append(Candidate(plan, float(rate_KN[k, n]), float(score_KN[k, n]), float(risk_KN[k, n])))
    return found
