"""Forecasts: what each tier would give and cost by the beliefs of now, with a lower and an upper bound.

Rows are grouped by the bits of their lengths, as acceptance is. A plan may have the retrieval tier read half or twice
the usual budget for the rows of one group; tiers and gammas are those of all rows. Shape suffixes are those of `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cost_model import CostModel
from triforce.planner.pass_costs import AMONG_MODELS, FULL
from triforce.planner.plan import BudgetFactors, Estimates
from triforce.planner.planner_config import CONFIG

BUDGET_STEPS = 0.5, 1.0, 2.0  # times the usual budget that may be read
MIN_SPARSITY = 2  # times as long as another budget than the usual one a context is, at least
WIDEST = 33  # tokens of the widest pass of a plan
BOUNDS_Z = np.array([-CONFIG.caution, 0.0, CONFIG.optimism])
"""Standard deviations from the mean."""


def budget_options(view: RetrievalView, lengths: Sequence[int]) -> list[BudgetFactors]:
    """The present budgets, and all that differ by one step for one group of rows, where budgets are to be chosen."""
    groups, budget = sorted({length.bit_length() for length in lengths}), view.setting.budget
    now = {bits: view.times[bits] for bits in groups if bits in view.times}
    found = [now]
    if budget.open and view.setting.refresh == 1 and not view.full.pool.offloaded:
        for bits in groups:
            least, at = 1 << (bits - 1), BUDGET_STEPS.index(now.get(bits, 1.0))
            for factor in (*BUDGET_STEPS[max(0, at - 1) : at], *BUDGET_STEPS[at + 1 : at + 2]):
                if factor == 1.0 or budget.of(least, factor) * MIN_SPARSITY <= least:
                    found.append({**now, bits: factor})
    return [tuple((bits, each[bits]) for bits in groups if each.get(bits, 1.0) != 1.0) for each in found]


@dataclass(frozen=True, slots=True)
class Beliefs:
    """All that forecasts are made of."""

    costs: CostModel
    acceptance: AcceptanceTracker
    hindsight: NgramHindsight
    view: RetrievalView

    def estimates(self, lengths: Sequence[int], budgets: Sequence[BudgetFactors] = ((),)) -> Estimates:
        """Return what they say of rows of these lengths, with each of these budgets of the retrieval tier."""
        rows, keys_K, accepted_KZ = len(lengths), *self._retrieval(lengths, budgets)
        keys = {FULL: [sum(lengths)], AMONG_MODELS: [sum(lengths)], "retrieval": keys_K, "draft": [0], "ngram": [0]}
        seconds_KW = {tier: self.costs.passes.table(tier, rows, each_K, WIDEST) for tier, each_K in keys.items()}
        accepted = {tier: self._bounds(tier, max(lengths))[None] for tier in ("draft", "ngram")}
        return Estimates(rows, seconds_KW, {**accepted, "retrieval": accepted_KZ}, *self.hindsight.means())

    def _bounds(self, tier: str, length: int, factor: float = 1.0) -> np.ndarray:
        mean, deviation = self.acceptance.of(tier, length, factor)
        return np.clip(mean + BOUNDS_Z * deviation, 0, 1)

    def _retrieval(self, lengths: Sequence[int], budgets: Sequence[BudgetFactors]) -> tuple[list[int], np.ndarray]:
        """Keys that all rows read, by budget, and the retrieval tier's acceptance."""
        bits = [length.bit_length() for length in lengths]
        means = {each: sum(n for n in lengths if n.bit_length() == each) // bits.count(each) for each in bits}
        keys_K, accepted_KZ = [0] * len(budgets), np.zeros((len(budgets), len(BOUNDS_Z)))
        for k, factors in enumerate(map(dict, budgets)):
            for each, mean in means.items():
                rows, factor = bits.count(each), factors.get(each, 1.0)
                keys_K[k] += rows * self.view.keys(mean, budget=self.view.setting.budget.of(mean, factor))
                accepted_KZ[k] += rows / len(lengths) * self._bounds("retrieval", mean, factor)
        return keys_K, accepted_KZ
