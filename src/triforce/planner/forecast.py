"""Forecast of seconds and acceptance of each tier for the rows of a batch, with the present budget and with others.

Rows are grouped by the bits of their lengths, as acceptance is. A replanning may take half or twice the usual budget
for the rows of one group; tiers and gammas are those of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cost_model import CostModel
from triforce.planner.fallback import SpeculationFallback
from triforce.planner.plan import PLAIN, Amount, Plan, rate

BUDGET_STEPS = 0.5, 1.0, 2.0  # times the usual budget that may be read
MIN_SPARSITY = 2  # times as long as another budget than the usual one a context is, at least

MIN_GAIN_OF_BUDGET = 1.06
"""Times the tokens per second with the usual budget that another one has to promise, for each group of rows."""

MIN_GAIN = 1.04  # times the tokens per second of the current plan: a change has to promise more
MIN_GAIN_OVER_PLAIN = 1.15, 1.04  # times those of plain decoding: to leave it, and to stay away from it

FUSED_DRAFT_KEYS = 1000
"""Keys that a fused draft counts as: it reads the draft's weights for each token, whatever the rows."""

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
    """Keys that a pass of a tier reads, of all rows."""
    if tier == "full":
        return sum(lengths)
    if tier == "retrieval":
        return sum(map(view.keys, lengths))
    return FUSED_DRAFT_KEYS if tier == "draft" else 0


class Forecast:
    """`TierEstimates` for rows of these lengths. What depends on the budget is a column, with a row for each."""

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceTracker,
        hindsight: NgramHindsight,
        view: RetrievalView,
        lengths: Sequence[int],
        budgets: Sequence[BudgetFactors] = ({},),
    ) -> None:
        self.rows, self._longest = len(lengths), max(lengths)
        self._costs, self._acceptance, self._hindsight, self._view = costs, acceptance, hindsight, view
        self.budgets, self._lengths = budgets, lengths
        self._lines: dict[str, tuple[Amount, Amount]] = {}
        self.required_gain = _column([MIN_GAIN_OF_BUDGET ** len(factors) for factors in budgets])
        """Times the tokens per second with the usual budgets that these have to promise."""

    def cost(self, tier: str, tokens: Amount) -> Amount:
        if tier not in self._lines:
            self._lines[tier] = self._line(tier)
        base, each = self._lines[tier]
        return base + each * tokens

    def draft_cost(self, tier: str, tokens: Amount) -> Amount:
        return self.cost(tier, tokens) if tier == "draft" else tokens * self.cost(tier, 1)

    def hindsight(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        proposed, accepted, found = self._hindsight.of(gamma, alone)
        trust = self._acceptance.of("ngram", self._longest)
        return trust * proposed, trust * accepted, trust * found

    def acceptance(self, tier: str) -> Amount:
        if tier == "full":
            return 1.0
        return self._retrieval[1] if tier == "retrieval" else self._acceptance.of(tier, self._longest)

    def _line(self, tier: str) -> tuple[Amount, Amount]:
        """Seconds of a pass, and of each token: see `CostModel.line`."""
        if tier != "retrieval":
            return self._costs.line(tier, self.rows, keys_read(tier, self._lengths, self._view))
        reads = self._retrieval[0]
        lines = (_retrieval_line(self._costs, self.rows, reads[0], keys) for keys in reads)
        base, each = zip(*lines, strict=True)
        return _column(base), _column(each)

    @cached_property
    def _retrieval(self) -> tuple[list[int], Amount]:
        """Keys that all rows read, and acceptance, by budget."""
        sizes: dict[int, list[int]] = {}
        for length in self._lengths:
            sizes.setdefault(length.bit_length(), []).append(length)
        means = {bits: (len(some), sum(some) // len(some)) for bits, some in sizes.items()}
        reads, acceptance = [], []
        for factors in self.budgets:
            keys, accepted = 0, 0.0
            for bits, (count, mean) in means.items():
                factor = factors.get(bits, 1.0)
                keys += count * self._view.keys(mean, budget=self._view.setting.budget.of(mean, factor))
                accepted += count * self._acceptance.of("retrieval", mean, factor)
            reads.append(keys)
            acceptance.append(accepted / self.rows)
        return reads, _column(acceptance)


def _retrieval_line(costs: CostModel, rows: int, present: int, keys: int) -> tuple[float, float]:
    """Seconds of a retrieval pass over so many keys, as `CostModel.line`, where `present` keys are read now.

    While passes are alike nothing shows the cost of a key: it is taken to be that of the full tier, at least. Where so
    many keys were never read, a pass is taken to cost at most one of the full tier, of the same weights, over as many.
    """
    now, nothing = costs.line("retrieval", rows, present), costs.line("full", rows, 0)
    if costs.covers("full", rows, present) and not costs.covers("retrieval", rows, present):
        now = min(now, costs.line("full", rows, present), key=sum)
    own, exact = costs.line("retrieval", rows, keys), costs.line("full", rows, abs(keys - present))
    sign = 1 if keys > present else -1
    more = [max(sign * (a - b), c - d) for a, b, c, d in zip(own, now, exact, nothing, strict=True)]
    return now[0] + sign * more[0], now[1] + sign * more[1]


def _column(amounts: Sequence[float]) -> Any:
    """A column of these amounts; a number, if there is only one."""
    return np.array(amounts)[:, None] if len(amounts) > 1 else amounts[0]


def best_plan(
    among: Iterable[tuple[tuple[str, ...], Sequence[Amount]]],
    forecast: Forecast,
    current: Plan,
    fallback: SpeculationFallback,
) -> tuple[Plan, float]:
    """The plan with most tokens per second of each row, or the current one if it is about as good; and its rate.

    among: tiers, and of each but the full one its gammas, entry n that of plan n; with each budget of the forecast.
    """
    plain = fallback.correction(False) / forecast.cost("full", 1)
    best, highest, present = PLAIN, plain, plain
    for tiers, gammas in among:
        if "ngram" in tiers and not forecast.hindsight(1, tiers[0] == "ngram")[2]:
            continue
        rates_KN = _rates(tiers, gammas, forecast, fallback)
        if tiers == current.tiers:
            present = float(_rates(tiers, current.gammas, forecast, fallback)[0, 0])
        k, at = divmod(int(rates_KN.argmax()), rates_KN.shape[1])
        if rates_KN[k, at] > highest:
            factors = tuple(sorted(forecast.budgets[k].items())) if "retrieval" in tiers else ()
            best, highest = Plan(tiers, tuple(int(each[at]) for each in gammas), factors), float(rates_KN[k, at])
    needed = MIN_GAIN_OVER_PLAIN[not current.plain] * plain
    if highest < needed:
        best, highest = PLAIN, plain
    if not best.plain and present > needed and highest < MIN_GAIN * present:
        best, highest = current, present
    return best, highest * MIN_GAIN_OF_BUDGET ** len(best.budget_factors)


def _rates(
    tiers: tuple[str, ...], gammas: Sequence[Amount], forecast: Forecast, fallback: SpeculationFallback
) -> np.ndarray:
    """Tokens per second (K budgets, N plans) of plans of these tiers, corrected by what was measured."""
    rates_KN = np.atleast_2d(rate(tiers, tuple(gammas), forecast)) * fallback.correction(True)
    return rates_KN / forecast.required_gain if "retrieval" in tiers else rates_KN
