"""Chooses the plan of a batch between proposals of the full tier: observe -> forecast -> choose -> apply.

Observed are the seconds of forward passes (`CostModel`), the accepted share of each tier's draft tokens
(`AcceptanceTracker`), and what n-grams of the text would have proposed (`NgramHindsight`). Under `seeded` no decision
can change a text; under `rejection` none depends on a token that is still to be drawn, so the distribution is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import FullView, RetrievalView
from triforce.planner.acceptance import AcceptanceTracker, NgramHindsight
from triforce.planner.cadence import Cadence, Exploration
from triforce.planner.cost_model import CostModel
from triforce.planner.fallback import WINDOW, SpeculationFallback, Throughput
from triforce.planner.forecast import BudgetFactors, Forecast, best_plan, budget_options
from triforce.planner.plan import PLAIN, Plan, families
from triforce.planner.tiers import Observer, link
from triforce.ragged import Bools
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier
from triforce.speculation.counters import REMEMBERED

REPLAN_EVERY = 4  # proposals between two replannings, at least
LEARNING_RATIO = 200.0  # seconds of decoding for each second that learning from the latest proposals takes
PROBE_EVERY = 64  # proposals for one of plain decoding, so that its cost stays known


class PlanController:
    """Decides for one batch which tiers draft, how many tokens, and how much the retrieval tier reads.

    tiers: all tiers that there are, n-grams first and the full tier last, none linked to another (`modes.unlinked`).
    temperature: the mean of the batch. clock: seconds, for what replanning itself takes. ranks: all follow rank 0, as
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
        self.costs, self._clock, self.ranks = costs, clock, ranks
        self.tiers = list(tiers)
        self.by_name = {tier.name: tier for tier in tiers}
        self.top: Tier[FullView] = self.by_name["full"]  # type: ignore[assignment]
        ngrams: NgramProposer = self.by_name["ngram"]  # type: ignore[assignment]
        self.view: RetrievalView = self.by_name["retrieval"].cache  # type: ignore[attr-defined]
        self.plan, self.name = PLAIN, str(PLAIN)
        self.changes = 0
        """Plans applied so far."""
        self.predicted = self.plain = 0.0
        """Tokens per second of each row, expected of the current plan and of plain decoding; 0: not known yet."""
        self.budget: Callable[[int], int] | None = None
        """Tokens that the retrieval tier reads of a context of so many, where the plan chooses that."""
        self.idle = True
        """Whether plain decoding is best, so that the text is only watched for n-grams that repeat."""
        self.current_plan = PLAIN  # the one chosen; `plan` is plain in its place to explore, probe, pause or observe
        self._budget_factors: BudgetFactors = {}
        self.acceptance = AcceptanceTracker(costs.acceptance, temperature)
        self.hindsight = NgramHindsight(ngrams)
        self.observer = Observer(self.by_name, self.view, costs, self.acceptance, self.hindsight)
        self.fallback, self._cadence = SpeculationFallback(), Cadence()
        self._grain = self.top.cache.grain
        self._proposals = self.replanned_at = 0
        self._fallback_until = 0  # the proposal until which plain decoding goes on, as speculation lost
        self._kind = ""  # of the texts at their first proposal, see `AcceptanceTracker.kind`
        self.lengths: Sequence[int] = ()  # of the texts before the latest proposal
        self.live_B: Bools = np.zeros(len(self.top.cache.lengths_B), bool)
        self._learning_took = 0.0  # seconds
        self._unlearnt = Throughput()  # proposals since the last time
        known = costs.knows(*(name for name in self.by_name if name != "ngram"))
        self.exploration = None if ranks.broadcast(known) else Exploration("draft" in self.by_name)

    def steer(self, prefix: SequenceState, live_B: Bools) -> None:
        """Link the tiers for the next proposal. While plain decoding is best, most calls return at once."""
        if not self.idle or self._cadence.due or self.ranks.count > 1:
            self._decide(prefix, live_B)
        self._proposals += 1

    def observe(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """Note a proposal: texts of these lengths took `taken` tokens in all, in so many seconds."""
        self._cadence.elapsed += seconds
        self.lengths = lengths
        self._unlearnt.add(taken / len(lengths), seconds)
        if self._unlearnt.proposals >= REMEMBERED or (not self.idle and self._learning_is_due()):
            self._learn()

    def conclude(self, prefix: SequenceState, live_B: Bools) -> None:
        """Learn from the latest proposals before the next one, which will be of another kind."""
        if self._unlearnt.proposals:
            self.lengths, self.live_B = prefix.lengths_B[live_B].tolist(), live_B
            self._learn()

    def close(self, prefix: SequenceState) -> None:
        """Keep what was learnt for the next texts: these are done."""
        if self.plan.plain and self._unlearnt.proposals:
            self._learn()
        if not self.lengths:  # nothing was proposed
            return
        self.costs.trust[self._kind] = self.fallback.kept()
        self.costs.plain.pop(self._kind, None)
        if self.idle and self.acceptance.kind(self.lengths) == self._kind:
            for b in range(len(prefix.lengths_B)):
                self._cadence.add_hits(*self.hindsight.update(prefix, b))  # to the end
            self.costs.plain[self._kind] = self.plain, self._cadence.kept()

    def apply(self, plan: Plan, prefix: SequenceState, live_B: Bools) -> None:
        """Link the tiers by a plan. Passes that are not learnt from by now are dropped."""
        link(self.by_name, plan, self.plan, prefix, live_B)
        if plan.tiers != self.plan.tiers:
            self.fallback.window.clear()
        if "retrieval" in plan.tiers:
            self.view.times = dict(plan.budget_factors)
        chosen = "retrieval" in plan.tiers and self.view.setting.budget.open
        self.plan, self.name, self.budget = plan, str(plan), self.view.budget if chosen else None
        self.changes += 1
        self._unlearnt = Throughput()
        for tier in self.tiers:
            tier.counters.new_passes()

    def _decide(self, prefix: SequenceState, live_B: Bools) -> None:
        if not self._kind:
            self._begin(prefix.lengths_B[live_B].tolist())
        if self.exploration is not None and self._explore(self.exploration, prefix, live_B):
            return
        due = self._cadence.due and (self._proposals == 0 or self._proposals - self.replanned_at >= REPLAN_EVERY)
        if self.ranks.broadcast(due):
            self._replan(prefix, live_B)
        elif self.idle and self._proposals:
            return
        self._follow(prefix, live_B)

    def _begin(self, lengths: list[int]) -> None:
        """Start from what other texts of the kind have shown."""
        self._kind = self.acceptance.kind(lengths)
        self.fallback = SpeculationFallback(self.costs.trust.get(self._kind, 1.0))
        if self._kind in self.costs.plain:
            self.plain, kept = self.costs.plain[self._kind]
            self.predicted, self._cadence = self.plain, Cadence(*kept)

    def _explore(self, exploration: Exploration, prefix: SequenceState, live_B: Bools) -> bool:
        """Apply a plan that shows what passes cost; returns False once there is none left."""
        if exploration.done:
            self.conclude(prefix, live_B)
            self.costs.settle()
            self._cadence.replan_now()
            self.exploration = None
            return False
        plan = exploration.plan(self._proposals)
        self.top.cache.grain = self._grain if exploration.speculates_next(self._proposals) else 0
        if plan != self.plan:
            self.conclude(prefix, live_B)
            self.apply(plan, prefix, live_B)
        self.live_B, self.idle = live_B, False
        return True

    def _replan(self, prefix: SequenceState, live_B: Bools) -> None:
        """Look for n-grams that repeat, and choose a plan; while plain decoding is best, only after enough hits."""
        began, rows, lengths = self._clock(), live_B.nonzero()[0].tolist(), prefix.lengths_B[live_B].tolist()
        hits = self._cadence.add_hits(*self.hindsight.update(prefix, rows[self._proposals % len(rows)]))
        review = self._cadence.review_due
        self._cadence.watched(self._clock() - began)
        if hits or review or not self.idle:
            if review and self.idle:
                self.conclude(prefix, live_B)
            self.current_plan = self.choose(lengths, review)
            self._cadence.planned(self._clock() - began, hits, review, no_gain=self.current_plan.plain)
        self.replanned_at = self._proposals

    def choose(self, lengths: list[int], review: bool) -> Plan:
        """The plan from now on. Without `review` budgets stay, and from plain decoding only n-grams are weighed."""
        all_tiers = review or not self.current_plan.plain
        sparse = all_tiers and any(length > self.view.budget(length) for length in lengths)
        budgets = budget_options(self.view, self._budget_factors, lengths) if sparse else [{}]
        budgets = budgets if review else budgets[:1]
        forecast = Forecast(self.costs, self.acceptance, self.hindsight, self.view, lengths, budgets)
        exact = forecast.cost("full", 1)
        self.plain = self.fallback.correction(False) / exact
        sparse = sparse and np.min(forecast.cost("retrieval", 1)) < exact
        among = families(all_tiers and "draft" in self.by_name, sparse)
        plan, self.predicted = best_plan(among, forecast, self.current_plan, self.fallback)
        return plan

    def _follow(self, prefix: SequenceState, live_B: Bools) -> None:
        """Apply the current plan, or plain decoding in its place: to probe, in fallback, and to observe attention."""
        probing = self._proposals % PROBE_EVERY == PROBE_EVERY - 1 and not self.current_plan.plain
        falls_back = self._proposals < self._fallback_until
        wanted = PLAIN if probing or falls_back else self.current_plan
        wanted, self.current_plan = self.ranks.broadcast((wanted, self.current_plan))
        if "retrieval" in self.current_plan.tiers:
            self._budget_factors = dict(self.current_plan.budget_factors)
        retrieves = "retrieval" in wanted.tiers
        ready = not retrieves or self.top.cache.grain == self._grain
        self.top.cache.grain = self._grain if retrieves or "retrieval" in self.current_plan.tiers else 0
        if ready and wanted is not self.plan and wanted != self.plan:
            self.apply(wanted, prefix, live_B)
        self.live_B, self.idle = live_B, self.plan.plain and self.current_plan.plain

    def _learning_is_due(self) -> bool:
        """Whether enough was decoded for the time that learning takes; sooner after a probe, and where drafts lose."""
        if self._unlearnt.seconds >= LEARNING_RATIO * self._learning_took:
            return True
        if self.plan.plain:
            return self._proposals > self._fallback_until
        return self._unlearnt.proposals == WINDOW[0] and self._unlearnt.loses_to(self.plain)

    def _learn(self) -> None:
        """Learn from the latest proposals, and fall back where speculation lost to plain decoding."""
        began, lengths = self._clock(), self.lengths
        self.observer.passes(self.plan, lengths, self._unlearnt.seconds)
        if self.plan.plain:
            costed = 1 / self.costs.seconds("full", 1, len(lengths), sum(lengths))
            self.plain = self.fallback.observe_plain(self._unlearnt, costed)
        else:
            self.observer.verdicts(self.plan, lengths, self.live_B, self._unlearnt.proposals)
            pause = self.fallback.observe_speculation(self._unlearnt, self.predicted, self.plain)
            if pause:
                self._fallback_until = self._proposals + pause
                self._cadence.replan_now()  # what led here deserves another look
        self._unlearnt, self._learning_took = Throughput(), self._clock() - began
