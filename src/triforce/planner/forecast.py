"""What a pilot expects of the rows there are, with the budget that the retrieval tier has and with others.

Rows are told apart by the bits of their lengths, as the shares of what is kept are. A step may go to half or twice the
usual budget for rows of one size; tiers and gammas are those of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker
from triforce.planner.cost_model import CostModel
from triforce.planner.ngram_hindsight import NgramHindsight
from triforce.planner.plan import Amount

TIMES = 0.5, 1.0, 2.0
"""The usual budget, and what may be read instead."""
LEAST = 2
"""Times as long as another budget a context is, at least."""

OTHER = 1.06
"""Times the worth with the usual budget: less is not worth another one, for rows of each size."""

BURST = 1000
"""A draft's weights are read for each of its guesses, whatever the rows: that counts as so many keys of them all."""

Times = Mapping[int, float]


def options(view: RetrievalView, times: Times, lengths: Sequence[int]) -> list[dict[int, float]]:
    """The budgets as they are, and all that differ by one step for rows of one size, where they are to be chosen."""
    sizes = sorted({length.bit_length() for length in lengths})
    times = {bits: times[bits] for bits in sizes if bits in times}
    found = [times]
    if not (view.setting.budget.open and view.setting.refresh == 1 and not view.full.pool.offloaded):
        return found
    for bits in sizes:
        possible = [each for each in TIMES if each == 1.0 or _fits(view, bits, each)]
        at = possible.index(times.get(bits, 1.0))
        for other in possible[max(0, at - 1) : at] + possible[at + 1 : at + 2]:
            changed = {**times, bits: other}
            found.append({size: each for size, each in changed.items() if each != 1.0})
    return found


def _fits(view: RetrievalView, bits: int, times: float) -> bool:
    return LEAST * view.setting.budget.of(1 << (bits - 1), times) <= 1 << (bits - 1)


def keys_seen(tier: str, lengths: Sequence[int], view: RetrievalView) -> int:
    """Keys that a pass of a tier sees, of all rows."""
    if tier == "full":
        return sum(lengths)
    if tier == "retrieval":
        return sum(map(view.keys, lengths))
    return BURST if tier == "draft" else 0


class Forecast:
    """See `plan.TierEstimates`; amounts that depend on the budget are columns, one row for each of `options`."""

    def __init__(
        self,
        costs: CostModel,
        watch: AcceptanceTracker,
        echo: NgramHindsight,
        view: RetrievalView,
        lengths: Sequence[int],
        options: Sequence[Times] = ({},),
    ) -> None:
        self.rows, self._longest = len(lengths), max(lengths)
        self._costs, self._watch, self._echo, self._view = costs, watch, echo, view
        self.options, self._lengths = options, lengths
        self._lines: dict[str, tuple[Amount, Amount]] = {}
        self.caution = _column([OTHER ** len(times) for times in options])
        """How much better these budgets have to be."""

    def cost(self, tier: str, tokens: Amount) -> Amount:
        if tier not in self._lines:
            self._lines[tier] = self._line(tier)
        base, each = self._lines[tier]
        return base + each * tokens

    def alone(self, tier: str, tokens: Amount) -> Amount:
        return self.cost(tier, tokens) if tier == "draft" else tokens * self.cost(tier, 1)

    def echo(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        made, kept, found = self._echo.of(gamma, alone)
        trust = self._watch.share("ngram", self._longest)
        return trust * made, trust * kept, trust * found

    def share(self, tier: str) -> Amount:
        if tier == "full":
            return 1.0
        return self._retrieval[1] if tier == "retrieval" else self._watch.share(tier, self._longest)

    def _line(self, tier: str) -> tuple[Amount, Amount]:
        """See `CostModel.line`."""
        if tier != "retrieval":
            return self._costs.line(tier, self.rows, keys_seen(tier, self._lengths, self._view))
        reads = self._retrieval[0]
        base, each = zip(*(_retrieval(self._costs, self.rows, reads[0], keys) for keys in reads), strict=True)
        return _column(base), _column(each)

    @cached_property
    def _retrieval(self) -> tuple[list[int], Amount]:
        """Of each option the keys that all rows read, and the share kept."""
        sizes: dict[int, list[int]] = {}
        for length in self._lengths:
            sizes.setdefault(length.bit_length(), []).append(length)
        means = {bits: (len(some), sum(some) // len(some)) for bits, some in sizes.items()}
        reads, shares = [], []
        for times in self.options:
            keys, kept = 0, 0.0
            for bits, (count, mean) in means.items():
                each = times.get(bits, 1.0)
                keys += count * self._view.keys(mean, budget=self._view.setting.budget.of(mean, each))
                kept += count * self._watch.share("retrieval", mean, each)
            reads.append(keys)
            shares.append(kept / self.rows)
        return reads, _column(shares)


def _retrieval(costs: CostModel, rows: int, present: int, keys: int) -> tuple[float, float]:
    """What a retrieval pass over so many keys takes, as `CostModel.line` has it, where so many are usual.

    As long as they are alike nothing tells what a key costs: no less than one of the exact tier, it is taken to be.
    Where so many were never read, it takes no more than a pass of the exact tier, of the same weights, over as many.
    """
    usual, nothing = costs.line("retrieval", rows, present), costs.line("full", rows, 0)
    if costs.told("full", rows, present) and not costs.told("retrieval", rows, present):
        usual = min(usual, costs.line("full", rows, present), key=sum)
    own, exact = costs.line("retrieval", rows, keys), costs.line("full", rows, abs(keys - present))
    sign = 1 if keys > present else -1
    more = [max(sign * (a - b), c - d) for a, b, c, d in zip(own, usual, exact, nothing, strict=True)]
    return usual[0] + sign * more[0], usual[1] + sign * more[1]


def _column(amounts: Sequence[float]) -> Any:
    """A number, if there is only one."""
    return np.array(amounts)[:, None] if len(amounts) > 1 else amounts[0]
