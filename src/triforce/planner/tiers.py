"""Tiers under a plan: linked as it says, and asked by their counters what passes cost and what was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from triforce.kvcache import RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cost_model import CostModel
from triforce.planner.forecast import keys_read
from triforce.planner.pass_costs import AMONG_MODELS, FULL
from triforce.planner.plan import Plan
from triforce.ragged import Bools
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
    _calls: int = 0

    def passes(self, plan: Plan, lengths: Sequence[int], seconds: float) -> float:
        """Learn what passes cost from proposals that took so many seconds: the time between passes is theirs, too.

        Returns the seconds that such passes usually take: a machine that did something else is no fault of the plan.
        """
        passes = {name: self.tiers[name].counters.new_passes() for name in plan.tiers}
        self._calls = sum(rows for _, rows, _ in passes.get("ngram", ()))
        count = sum(len(some) for some in passes.values())
        between = max(0.0, seconds - sum(took for some in passes.values() for *_, took in some)) / max(1, count)
        usual = 0.0
        for tier, some in passes.items():
            keys = keys_read(tier, lengths, self.view) / len(lengths)
            name = AMONG_MODELS if tier == FULL and {*plan.tiers} - {FULL, "ngram"} else tier
            alike: dict[tuple[int, int], list[float]] = {}
            for width, rows, seconds_of in some:
                alike.setdefault((width, rows), []).append(seconds_of)
            for (width, rows), each in alike.items():
                took = median(each) if len(each) > FEW else min(each)
                once = self.costs.observe(name, width, rows, keys * rows, took + between, len(each))
                usual += len(each) * once
        return usual

    def verdicts(self, plan: Plan, lengths: Sequence[int], live_B: Bools, proposals: int) -> None:
        """Learn how many draft tokens of each tier some proposals accepted. After `passes`."""
        self.acceptance.fade(proposals)
        for name in plan.tiers[:-1]:
            tier = self.tiers[name]
            news_B2 = tier.counters.new_verdicts()
            if name == "draft":
                self.acceptance.add(name, max(lengths), *news_B2.sum(0).tolist())
            elif isinstance(tier, NgramProposer):
                accepted = int(news_B2[:, 0].sum())
                predicted = self._predicted(tier)
                self.acceptance.add(name, max(lengths), accepted, max(0.0, predicted - accepted))
            elif name == "retrieval":
                bits_B = [length.bit_length() for length in lengths]
                for bits in set(bits_B):
                    rows = [b for b, each in zip(live_B.nonzero()[0].tolist(), bits_B, strict=True) if each == bits]
                    accepted, rejected = news_B2[rows].sum(0).tolist()
                    self.acceptance.add(name, (1 << bits) - 1, accepted, rejected, self.view.times.get(bits, 1.0))

    def _predicted(self, ngrams: NgramProposer) -> float:
        """Tokens that hindsight expected to be accepted of the latest proposals of n-grams."""
        before, self._offered = self._offered, int(ngrams.counters.proposed_B.sum())
        proposed_AG, accepted_AG, _ = self.hindsight.means()
        if ngrams.below is None:
            return float(self._calls * accepted_AG[1, ngrams.gamma])
        proposed = proposed_AG[0, ngrams.gamma]
        return float((self._offered - before) * accepted_AG[0, ngrams.gamma] / proposed) if proposed else 0.0
