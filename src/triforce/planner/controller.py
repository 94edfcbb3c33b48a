"""Chooses the plan of a batch between proposals of the full tier: observe -> forecast -> choose -> apply.

Observed are the seconds of forward passes (`CostModel`), the accepted share of each tier's draft tokens
(`AcceptanceTracker`), and what n-grams of the text would have proposed (`NgramHindsight`). Under `seeded` no decision
can change a text; under `rejection` none depends on a token that is still to be drawn, so the distribution is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter

import numpy as np

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import FullView, RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.account import Account
from triforce.planner.cadence import Cadence
from triforce.planner.cost_model import CostModel
from triforce.planner.forecast import (
    Beliefs,
    BudgetFactors,
    Candidate,
    Forecast,
    PlanLimits,
    budget_options,
    candidates,
)
from triforce.planner.plan import PLAIN, Plan
from triforce.planner.planner_config import CONFIG
from triforce.planner.tiers import Observer, link
from triforce.ragged import Bools
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier
from triforce.speculation.counters import REMEMBERED

PROBE_EVERY = 64  # proposals for one of plain decoding, where that may be best, so that its cost stays known
ENDLESS = 10**6  # tokens to come, where nobody says how many


class State(Enum):
    """Reasons for which a batch is decoded as it is."""

    PLAIN = "plain decoding promises most"
    SPECULATING = "the plan promises most"
    TRYING = "the plan may be best, too little was seen of it"
    GUARDED = "a plan promises more, but the text has lost what trials may lose"


@dataclass(slots=True)
class Unlearnt:
    """Consecutive proposals of one plan that nothing was learnt from yet: tokens of each row, and seconds."""

    tokens: float = 0.0
    seconds: float = 0.0
    proposals: int = 0


class PlanController:
    """Decides for one batch which tiers draft, how many tokens, and how much the retrieval tier reads.

    tiers: all tiers that there are, n-grams first and the full tier last, none linked to another (`modes.unlinked`).
    temperature: the mean of the batch. clock: seconds, for what thinking itself takes. ranks: all follow rank 0, as
    their clocks differ.
    """

    def __init__(
        self,
        tiers: Sequence[Proposer],
        costs: CostModel,
        temperature: float = 1.0,
        clock: Callable[[], float] = perf_counter,
        ranks: TPGroup = ALONE,
    ) -> None:
        self.costs, self._clock, self.ranks, self.tiers = costs, clock, ranks, list(tiers)
        self.by_name = {tier.name: tier for tier in tiers}
        self.top: Tier[FullView] = self.by_name["full"]  # type: ignore[assignment]
        ngrams: NgramProposer = self.by_name["ngram"]  # type: ignore[assignment]
        self.view: RetrievalView = self.by_name["retrieval"].cache  # type: ignore[attr-defined]
        self.state, self.plan, self.chosen, self.name = State.PLAIN, PLAIN, PLAIN, str(PLAIN)
        """`chosen` is the plan that was chosen; `plan`, the one applied, is another until attention was observed."""
        self.changes = 0
        """Plans applied so far."""
        self.predicted = 0.0
        """Tokens per second of each row, expected of the chosen plan; 0: not known yet."""
        self.budget: Callable[[int], int] | None = None
        """Tokens that the retrieval tier reads of a context of so many, where the plan chooses that."""
        self.acceptance = AcceptanceTracker(costs.acceptance, temperature)
        self.hindsight = NgramHindsight(ngrams)
        self.observer = Observer(self.by_name, self.view, costs, self.acceptance, self.hindsight)
        self.account, self._cadence = Account(), Cadence()
        self.forecast: Forecast | None = None
        self.found: list[Candidate] = []
        """The latest forecast, and the best plan of each choice of tiers by it."""
        self._budget_factors: BudgetFactors = {}
        self._grain = self.top.cache.grain
        self._proposals = self._first_thought = self._plain_at = 0
        self._kind = ""  # of the texts at their first proposal, see `AcceptanceTracker.kind`
        self.lengths: Sequence[int] = ()  # of the texts before the latest proposal
        self.live_B: Bools = np.zeros(len(self.top.cache.lengths_B), bool)
        self._unlearnt = Unlearnt()

    @property
    def plain(self) -> float:
        """Tokens per second of each row, expected of plain decoding; 0: not known yet."""
        return 1 / self.account.plain if self.account.plain else 0.0

    def steer(self, prefix: SequenceState, live_B: Bools, left: int = ENDLESS) -> None:
        """Link the tiers for the next proposal; at most `left` tokens are to come. Most calls return at once."""
        if self._proposals == 0:
            self._begin(prefix.lengths_B[live_B].tolist())
        idle = self.plan.plain and self.chosen.plain
        due = self._proposals >= self._first_thought and self._cadence.due(self.chosen.plain)
        if self.ranks.broadcast(due):
            self._think(prefix, live_B, left)
        elif idle:
            self._proposals += 1
            return
        elif self.ranks.broadcast(self._alarmed):
            self.chosen, self.state, self.predicted = PLAIN, State.GUARDED, self.plain
        self._follow(prefix, live_B)
        self._proposals += 1

    def observe(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """Note a proposal: texts of these lengths took `taken` tokens in all, in so many seconds."""
        self._cadence.elapsed += seconds
        self.lengths, unlearnt = lengths, self._unlearnt
        unlearnt.tokens += taken / len(lengths)
        unlearnt.seconds += seconds
        unlearnt.proposals += 1
        if unlearnt.proposals >= REMEMBERED:
            self._learn()

    def conclude(self, prefix: SequenceState, live_B: Bools) -> None:
        """Learn from the latest proposals before the next one, which will be of another kind."""
        if self._unlearnt.proposals:
            self.lengths, self.live_B = prefix.lengths_B[live_B].tolist(), live_B
            self._learn()

    def close(self, prefix: SequenceState) -> None:
        """Keep what was learnt for the next texts: these are done."""
        if self._unlearnt.proposals:
            self._learn()
        if self.lengths:
            self.costs.kinds.pop(self._kind, None)
            if self.state is State.PLAIN and self.acceptance.kind(self.lengths) == self._kind:
                self.costs.kinds[self._kind] = self._cadence.kept(self.account.plain)

    def apply(self, plan: Plan, prefix: SequenceState, live_B: Bools) -> None:
        """Link the tiers by a plan. Passes that are not learnt from by now are dropped."""
        link(self.by_name, plan, self.plan, prefix, live_B)
        if "retrieval" in plan.tiers:
            self.view.times = dict(plan.budget_factors)
        chosen = "retrieval" in plan.tiers and self.view.setting.budget.open
        self.plan, self.name, self.budget = plan, str(plan), self.view.budget if chosen else None
        self.changes += 1
        self._unlearnt = Unlearnt()
        for tier in self.tiers:
            tier.counters.new_passes()

    @property
    def _alarmed(self) -> bool:
        """Whether the latest proposals have lost more than they may."""
        lost = self._unlearnt.seconds - self._unlearnt.tokens * self.account.plain
        return not self.plan.plain and lost > max(self.account.headroom, self.account.plain)

    def _begin(self, lengths: list[int]) -> None:
        """Start from what other texts of the kind have left."""
        self._kind = self.acceptance.kind(lengths)
        if self._kind in self.costs.kinds:
            self.account.plain, *waits = self.costs.kinds[self._kind]
            self._cadence.resume(*waits)
            self.predicted = self.plain
        elif not self.costs.confirmed:
            self._first_thought = CONFIG.first_proposals

    def _think(self, prefix: SequenceState, live_B: Bools, left: int) -> None:
        """Look for n-grams that repeat, and choose a plan; while plain decoding is best, only if that is due."""
        began, rows, lengths = self._clock(), live_B.nonzero()[0].tolist(), prefix.lengths_B[live_B].tolist()
        _, hits = self.hindsight.update(prefix, rows[self._proposals % len(rows)])
        self._cadence.heard(hits, self._clock() - began)
        if self._cadence.elapsed >= self._cadence.think_at or not self.chosen.plain:
            self.conclude(prefix, live_B)
            self.chosen = self.choose(lengths, left)
            self._cadence.thought(self._clock() - began)

    def choose(self, lengths: list[int], left: int) -> Plan:
        """The plan from now on, for texts of these lengths of which at most `left` tokens are to come."""
        sparse = any(length > self.view.budget(length) for length in lengths)
        budgets = budget_options(self.view, self._budget_factors, lengths) if sparse else [{}]
        self.forecast = forecast = Forecast(
            Beliefs(self.costs, self.acceptance, self.hindsight, self.view), lengths, budgets
        )
        self.account.plain = float(forecast.cost("full", 1.0))
        limits = PlanLimits(left, self.account.headroom, self.account.plain)
        self.found = candidates(forecast, "draft" in self.by_name, sparse, limits)
        return self._chosen(self.found)

    def _chosen(self, found: list[Candidate]) -> Plan:
        """The best of these plans that may be followed, or plain decoding; says in `state` why."""
        best = max(found, key=lambda each: each.score, default=None)
        self.predicted = self.plain
        needed = CONFIG.leave_gain if self.chosen.plain else CONFIG.switch_gain
        if best is None or best.score < needed * self.plain:
            promised = any(each.rate > CONFIG.switch_gain * self.plain for each in found)
            self.state = State.GUARDED if promised else State.PLAIN
            return PLAIN
        same = next((each for each in found if each.plan.tiers == self.chosen.tiers), None)
        if same and same.score * CONFIG.switch_gain > best.score:
            best = same
        self.state = State.SPECULATING if best.rate > self.plain else State.TRYING
        self.predicted = best.rate
        return best.plan

    def _follow(self, prefix: SequenceState, live_B: Bools) -> None:
        """Apply the chosen plan, or go on for a proposal until the full tier has observed attention for it."""
        self.chosen = self.ranks.broadcast(self.chosen)
        often = self.costs.passes.count("full", 1) < CONFIG.plain_passes
        every = CONFIG.first_proposals if often else PROBE_EVERY
        probing = self._proposals - self._plain_at >= every and self.predicted < 2 * self.plain
        wanted = PLAIN if self.ranks.broadcast(probing) else self.chosen
        if wanted.plain:
            self._plain_at = self._proposals
        retrieves = "retrieval" in wanted.tiers
        if retrieves:
            self._budget_factors = dict(wanted.budget_factors)
        ready = not retrieves or self.top.cache.grain == self._grain
        self.top.cache.grain = self._grain if "retrieval" in self.chosen.tiers else 0
        if ready and wanted is not self.plan and wanted != self.plan:
            self.conclude(prefix, live_B)
            self.apply(wanted, prefix, live_B)
        self.live_B = live_B

    def _learn(self) -> None:
        """Learn from the latest proposals, all of one plan."""
        late, self._unlearnt = self._unlearnt, Unlearnt()
        usual = self.observer.passes(self.plan, self.lengths, late.seconds)
        self.account.plain = self.costs.seconds("full", 1, len(self.lengths), sum(self.lengths))
        least, most = usual / CONFIG.outlier, usual * CONFIG.outlier  # beyond them the machine did something else
        self.account.enter(late.tokens, min(max(late.seconds, least), most), self.plan.plain)
        self.predicted = self.plain if self.chosen.plain else self.predicted
        if self.plan.plain:
            self.acceptance.fade(late.proposals)
        else:
            self.observer.verdicts(self.plan, self.lengths, self.live_B, late.proposals)
