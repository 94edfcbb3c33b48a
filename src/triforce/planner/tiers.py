"""Tiers under a plan: linked as it says, and asked by their counters what passes cost and what was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cost_model import CostModel
from triforce.planner.pass_costs import AMONG_MODELS, FULL
from triforce.planner.plan import Plan
from triforce.ragged import Bools, Ints
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier
from triforce.speculation.ngram import FAR

FEW = 3  # passes of which the fastest one counts: what interrupts a pass makes it slower


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


@dataclass
class Observer:
    """Reads the counters of `tiers`, by name, and adds to `costs` and `acceptance`."""

    tiers: Mapping[str, Proposer]
    view: RetrievalView
    costs: CostModel
    acceptance: AcceptanceTracker
    hindsight: NgramHindsight
    _offered: int = 0  # tokens that n-grams have proposed so far

    def passes(self, plan: Plan, lengths: Sequence[int], seconds: float) -> float:
        """Learn what passes cost from proposals that took so many seconds: the time between passes is theirs, too.

        Returns the seconds that such passes usually take: a machine that did something else is no fault of the plan.
        """
        passes = [(name, *each) for name in plan.tiers for each in self.tiers[name].counters.new_passes()]
        between = max(0.0, seconds - sum(took for *_, took in passes)) / max(1, len(passes))
        alike: dict[tuple[str, int, int], list[float]] = {}
        for tier, width, rows, took in passes:
            alike.setdefault((tier, width, rows), []).append(took + between)
        among, usual = bool({*plan.tiers} - {FULL, "ngram"}), 0.0
        for (tier, width, rows), some in alike.items():
            keys = rows * self._keys(tier, lengths) / len(lengths)
            name = AMONG_MODELS if tier == FULL and among else tier
            took = median(some) if len(some) > FEW else min(some)
            usual += len(some) * self.costs.observe(name, width, rows, keys, took, len(some))
        return usual

    def _keys(self, tier: str, lengths: Sequence[int]) -> int:
        """Keys that a pass reads, of all rows; the draft's window is part of what each of its passes reads."""
        return sum(map(self.view.keys, lengths)) if tier == "retrieval" else sum(lengths) if tier == FULL else 0

    def verdicts(self, plan: Plan, lengths: Sequence[int], live_B: Bools, proposals: int) -> None:
        """Learn how many draft tokens of each tier some proposals accepted."""
        self.acceptance.fade(proposals)
        for name in plan.tiers[:-1]:
            tier = self.tiers[name]
            news_B2 = tier.counters.new_verdicts()
            accepted, rejected = news_B2.sum(0).tolist()
            if name == "retrieval":
                self._retrieved(news_B2[live_B], np.array([length.bit_length() for length in lengths]))
            elif isinstance(tier, NgramProposer):
                self.acceptance.add(name, max(lengths), accepted, max(0.0, self._predicted(tier) - accepted))
            else:
                self.acceptance.add(name, max(lengths), accepted, rejected)

    def _retrieved(self, news_R2: Ints, bits_R: Ints) -> None:
        """Learn from the verdicts of R live rows, by the size of their contexts."""
        for bits in set(bits_R.tolist()):
            accepted, rejected = news_R2[bits_R == bits].sum(0).tolist()
            self.acceptance.add("retrieval", (1 << bits) - 1, accepted, rejected, self.view.times.get(bits, 1.0))

    def _predicted(self, ngrams: NgramProposer) -> float:
        """Tokens that hindsight expected to be accepted of the latest proposals of n-grams."""
        before, self._offered = self._offered, int(ngrams.counters.proposed_B.sum())
        proposed_AG, accepted_AG, _ = self.hindsight.means()
        which = int(ngrams.below is None), ngrams.gamma
        return float((self._offered - before) * accepted_AG[which] / max(proposed_AG[which], 1e-9))
