"""Forecasts: what each plan would give and cost by the beliefs of now, with a lower and an upper bound.

Rows are grouped by the bits of their lengths, as acceptance is. A plan may have the retrieval tier read half or twice
the usual budget for the rows of one group; tiers and gammas are those of all rows. Shape suffixes are those of `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cost_model import CostModel
from triforce.planner.pass_costs import AMONG_MODELS, FULL
from triforce.planner.plan import NARROW_GAMMAS, Estimates
from triforce.planner.planner_config import CONFIG

BUDGET_STEPS = 0.5, 1.0, 2.0  # times the usual budget that may be read
MIN_SPARSITY = 2  # times as long as another budget than the usual one a context is, at least
WIDEST = 33  # tokens of the widest pass of a plan
BOUNDS_Z = np.array([-CONFIG.caution, 0.0, CONFIG.optimism])
"""Standard deviations from the mean."""

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

    def estimates(self, lengths: Sequence[int], budgets: Sequence[BudgetFactors] = ({},)) -> Estimates:
        """Return what they say of rows of these lengths, with each of these budgets of the retrieval tier."""
        seconds, rows, longest = self.costs.passes.table, len(lengths), max(lengths)
        keys_K, retrieval_KZ = self._retrieval(lengths, budgets)
        proposed_AG, accepted_AG, found_A = self.hindsight.means()
        return Estimates(
            rows,
            seconds(FULL, rows, [sum(lengths)], WIDEST)[0],
            seconds(AMONG_MODELS, rows, [sum(lengths)], WIDEST)[0],
            seconds("retrieval", rows, keys_K, WIDEST),
            seconds("draft", rows, [0], NARROW_GAMMAS[-1])[0],
            float(seconds("ngram", rows, [0], 1)[0, 1]),
            self._bounds("draft", longest),
            retrieval_KZ,
            proposed_AG,
            accepted_AG,
            found_A,
            self._bounds("ngram", longest),
        )

    def _bounds(self, tier: str, length: int, factor: float = 1.0) -> np.ndarray:
        mean, deviation = self.acceptance.of(tier, length, factor)
        return np.clip(mean + BOUNDS_Z * deviation, 0, 1)

    def _retrieval(self, lengths: Sequence[int], budgets: Sequence[BudgetFactors]) -> tuple[list[int], np.ndarray]:
        """Keys that all rows read, by budget, and the retrieval tier's acceptance."""
        sizes: dict[int, list[int]] = {}
        for length in lengths:
            sizes.setdefault(length.bit_length(), []).append(length)
        means = {bits: (len(some), sum(some) // len(some)) for bits, some in sizes.items()}
        reads, shares_KZ = [0] * len(budgets), np.zeros((len(budgets), len(BOUNDS_Z)))
        for k, factors in enumerate(budgets):
            for bits, (count, mean) in means.items():
                factor = factors.get(bits, 1.0)
                reads[k] += count * self.view.keys(mean, budget=self.view.setting.budget.of(mean, factor))
                shares_KZ[k] += count / len(lengths) * self._bounds("retrieval", mean, factor)
        return reads, shares_KZ
