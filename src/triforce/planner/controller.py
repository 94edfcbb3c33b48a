"""Steers a batch: before each proposal of the exact tier it may choose another plan, from what has been seen so far.

What it knows: seconds of passes (`CostModel`), which share of each tier's guesses was kept (`AcceptanceTracker`), and
what the text itself would have told (`NgramHindsight`). Under `seeded` no decision can change a text; under `rejection`
none depends on a token that is still to be drawn, so the law stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import numpy as np

from triforce.distributed.group import ALONE, TPGroup
from triforce.kvcache import FullView, RetrievalView
from triforce.planner.acceptance import AcceptanceTracker
from triforce.planner.cadence import Cadence
from triforce.planner.choose import PLAIN, choose
from triforce.planner.cost_model import CostModel
from triforce.planner.fallback import WATCHED, SpeculationFallback, Throughput
from triforce.planner.forecast import Forecast, Times, keys_seen, options
from triforce.planner.ngram_hindsight import NgramHindsight
from triforce.planner.plan import Plan, families
from triforce.ragged import Bools
from triforce.speculation import NgramProposer, Proposer, SequenceState, Tier
from triforce.speculation.counters import REMEMBERED
from triforce.speculation.ngram import FAR

EVERY = 4  # proposals between two thoughts, at least
LESSON = 200.0  # times the time that learning from some proposals takes is spent until the next time
PROBE = 64  # proposals between two of plain decoding, so that its cost stays known
PLAINLY = 8  # proposals of plain decoding, before others show what is not known of costs
FIRST: dict[str, list[tuple[int, ...]]] = {"draft": [(2, 4), (2, 4), (4, 2)], "retrieval": [(4,), (4,)]}
"""Gammas of those, by the lowest tier."""


class PlanController:
    """`top` is a ladder of all the tiers there are: full, retrieval and perhaps a draft.

    heat: the temperature of the texts. clock: what thoughts are timed with. Of several `ranks` all follow rank 0, as
    their clocks differ.
    """

    def __init__(
        self,
        top: Tier[FullView],
        rows: int,
        costs: CostModel,
        heat: float = 1.0,
        clock: Callable[[], float] = perf_counter,
        ranks: TPGroup = ALONE,
    ) -> None:
        self.costs, self._clock, self._ranks = costs, clock, ranks
        lookup = NgramProposer(rows)
        below: list[Proposer] = [lookup]
        tier: Proposer | None = top
        while tier:
            below.insert(1, tier)
            tier = tier.below
        self.tiers = below
        for level, part in enumerate(self.tiers):
            part.level = level  # tells them apart in the noise, and in the origins of tokens
        self._parts = {part.name: part for part in self.tiers}
        self.top, self.plan, top.below = top, PLAIN, None
        self._view: RetrievalView = self._parts["retrieval"].cache  # type: ignore[attr-defined]
        self._times: dict[int, float] = {}
        self._live_B: Bools = np.zeros(rows, bool)
        self.predicted = 0.0
        self.plain = 0.0
        """Tokens per second of each row that are expected of the course, and of plain decoding; 0: not known yet."""
        self.name = str(PLAIN)
        self.changes = 0
        """How often another plan was taken up."""
        self.budget: Callable[[int], int] | None = None
        """What the retrieval tier reads of so many tokens, where that is chosen, too."""
        self._echo, self._watch = NgramHindsight(lookup), AcceptanceTracker(costs.shares, heat)
        self._grain = top.cache.grain
        self._guard = SpeculationFallback()
        self._steps = self._thought = 0
        self._grounded = 0  # the step until which plain decoding goes on, as speculation lost
        self._course = self.plan
        self._calm = True  # nothing is guessed, nor is anything about to be
        self._pace = Cadence()
        self._kind = ""  # of the texts, as they begin
        self._lengths: Sequence[int] = ()  # of the texts, before the latest proposal
        self._asked = 0  # how often lookup was, for a row, in the proposals that are learnt from
        self._study_took = 0.0  # seconds that it took to learn from the latest proposals
        self._news = Throughput()
        known = costs.knows(*(name for name in self._parts if name != "ngram"))
        self._unseen = None if ranks.agree(known) else deque(self._first())
        """Plans to come that show what is not known of costs."""

    def _first(self) -> list[Plan]:
        tiers = ("draft", "retrieval", "full") if "draft" in self._parts else ("retrieval", "full")
        return [Plan(tiers, gammas) for gammas in FIRST[tiers[0]]]

    def steer(self, prefix: SequenceState, live_B: Bools) -> None:
        """Wire the ladder for the next proposal."""
        if not self._calm or self._pace.now >= self._pace.next or self._ranks.count > 1:
            self._decide(prefix, live_B)
        self._steps += 1

    def _decide(self, prefix: SequenceState, live_B: Bools) -> None:
        if not self._kind:
            self._begin(prefix.lengths_B[live_B].tolist())
        if self._unseen is not None and self._explore(prefix, live_B):
            return
        thinks = self._pace.now >= self._pace.next and (self._steps == 0 or self._steps - self._thought >= EVERY)
        if self._ranks.agree(thinks):
            self._think(prefix, live_B)
        elif self._calm and self._steps:
            return
        probing = self._steps % PROBE == PROBE - 1 and not self._course.plain
        wanted = PLAIN if probing or self._steps < self._grounded else self._course
        wanted, self._course = self._ranks.agree((wanted, self._course))
        if "retrieval" in self._course.tiers:
            self._times = dict(self._course.times)
        looks = "retrieval" in wanted.tiers
        ready = not looks or self.top.cache.grain == self._grain
        self.top.cache.grain = self._grain if looks or "retrieval" in self._course.tiers else 0
        if ready and wanted is not self.plan and wanted != self.plan:  # else the exact tier first looks what is seen
            self.wire(wanted, prefix, live_B)
        self._live_B = live_B
        self._calm = self.plan.plain and self._course.plain

    def _explore(self, prefix: SequenceState, live_B: Bools) -> bool:
        """Let the next proposal show what passes cost; whether there is still something to be seen.

        A text that ends within a few tokens shows nothing, and needs nothing.
        """
        assert self._unseen is not None
        if not self._unseen:
            self.conclude(prefix, live_B)
            self.costs.settle()
            self._pace.hurry()
            self._unseen = None
            return False
        wanted = PLAIN if self._steps < PLAINLY else self._unseen.popleft()
        self.top.cache.grain = self._grain if self._steps >= PLAINLY - 1 else 0
        if wanted != self.plan:
            self.conclude(prefix, live_B)
            self.wire(wanted, prefix, live_B)
        self._live_B, self._calm = live_B, False
        return True

    def learn(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """After a proposal from texts of these lengths, which gave so many tokens in all."""
        self._pace.now += seconds
        self._lengths = lengths
        news = self._news
        news.take(taken / len(lengths), seconds)
        if news.proposals >= REMEMBERED or (not self._calm and self._is_due()):
            self._study()

    def conclude(self, prefix: SequenceState, live_B: Bools) -> None:
        """Learn from the latest proposals before the next one, which will be of another kind."""
        if self._news.proposals:
            self._lengths, self._live_B = prefix.lengths_B[live_B].tolist(), live_B
            self._study()

    def close(self, prefix: SequenceState) -> None:
        """The texts are done: what is known now serves the next ones."""
        if self.plan.plain and self._news.proposals:
            self._study()
        if self._lengths:  # else nothing was proposed
            self.costs.trust[self._kind] = self._guard.kept()
            self.costs.plain.pop(self._kind, None)
            if self._calm and self._watch.kind(self._lengths) == self._kind:  # still
                for b in range(len(prefix.lengths_B)):
                    self._pace.hears(*self._echo.listen(prefix, b))  # to the end
                self.costs.plain[self._kind] = self.plain, self._pace.kept()

    def _is_due(self) -> bool:
        """Whether to look at the latest proposals: many at a time, where one is short against the time that it takes.

        Sooner if plain decoding was just tried, or if what was guessed loses to it. Where plain text goes on as such
        there is no hurry: before plans are weighed will do.
        """
        if self._news.seconds >= LESSON * self._study_took:
            return True
        if self.plan.plain:
            return self._steps > self._grounded
        return self._news.proposals == WATCHED[0] and self._news.loses_to(self.plain)

    def _study(self) -> None:
        """Learn from the latest proposals."""
        began, lengths = self._clock(), self._lengths
        self.time(lengths, self._news.seconds)
        if self.plan.plain:
            costed = 1 / self.costs.seconds("full", 1, len(lengths), sum(lengths))
            self.plain = self._guard.plain(self._news, costed)  # as it was just tried
        else:
            self._watch.fade(max(lengths), self._news.proposals)
            for name in self.plan.tiers[:-1]:
                self._judge(name, lengths)
            if rest := self._guard.speculated(self._news, self.predicted, self.plain):
                self._grounded = self._steps + rest
                self._pace.hurry()  # what led here is worth a thought
        self._news, self._study_took = Throughput(), self._clock() - began

    def time(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn what the passes of some proposals took.

        What was done between them is shared among them: it would not have been without.
        """
        passes = {name: self._parts[name].counters.fresh() for name in self.plan.tiers}
        self._asked = sum(rows for _, rows, _ in passes.get("ngram", ()))
        count = sum(len(some) for some in passes.values())
        between = max(0.0, seconds - sum(took for some in passes.values() for *_, took in some)) / max(1, count)
        for name, some in passes.items():
            of_row = keys_seen(name, lengths, self._view) / len(lengths)
            alike: dict[tuple[int, int], list[float]] = {}
            for width, rows, took in some:
                alike.setdefault((width, rows), []).append(took)
            for (width, rows), each in alike.items():
                self.costs.observe(name, width, rows, of_row * rows, median(each) + between, len(each))

    def forget(self) -> None:
        """The latest proposals are not to be learnt from."""
        self._news = Throughput()
        for part in self.tiers:
            part.counters.fresh()

    def _think(self, prefix: SequenceState, live_B: Bools) -> None:
        """Listen to the text, and choose a course.

        Where plain text goes on as such, there is nothing to choose until guesses from the text were right.
        """
        began, rows, lengths = self._clock(), live_B.nonzero()[0].tolist(), prefix.lengths_B[live_B].tolist()
        told = self._pace.hears(*self._echo.listen(prefix, rows[self._steps % len(rows)]))
        widely = self._pace.reviews
        self._pace.listened(self._clock() - began)
        if told or widely or not self._calm:
            if widely and self._calm:
                self.conclude(prefix, live_B)
            self._course = self._best(lengths, widely)
            self._pace.weighed(self._clock() - began, told, widely, in_vain=self._course.plain)
        self._thought = self._steps

    def _begin(self, lengths: list[int]) -> None:
        """What other texts of the kind have shown."""
        self._kind = self._watch.kind(lengths)
        self._guard = SpeculationFallback(self.costs.trust.get(self._kind, 1.0))
        if self._kind in self.costs.plain:
            self.plain, kept = self.costs.plain[self._kind]
            self.predicted, self._pace = self.plain, Cadence(*kept)

    def _best(self, lengths: list[int], widely: bool) -> Plan:
        """The course from now on.

        Unless all plans are weighed, it is one with the present budget, and where plain text goes on as such plain
        decoding or guesses from the text.
        """
        deep = widely or not self._course.plain
        less = deep and any(length > self._view.budget(length) for length in lengths)
        budgets = options(self._view, self._times, lengths) if less else [{}]
        world = self._outlook(lengths, budgets if widely else budgets[:1])
        exact = world.cost("full", 1)
        self.plain = self._guard.off(False) / exact
        less = less and np.min(world.cost("retrieval", 1)) < exact
        best, self.predicted = choose(families(deep and "draft" in self._parts, less), world, self._course, self._guard)
        return best

    def wire(self, plan: Plan, prefix: SequenceState, live_B: Bools) -> None:
        """Let the ladder follow a plan."""
        below: Proposer | None = None
        for name, gamma in zip(plan.tiers, (*plan.gammas, 1), strict=True):
            part = self._parts[name]
            part.gamma = gamma
            if isinstance(part, Tier):
                part.below = below
                if name not in self.plan.tiers:
                    part.catch_up(prefix, live_B & (prefix.lengths_B - part.cache.lengths_B > FAR))
            elif isinstance(part, NgramProposer):
                part.below = below if isinstance(below, Tier) else None
            below = part
        if plan.tiers != self.plan.tiers:
            self._guard.restart()
        if "retrieval" in plan.tiers:
            self._view.times = dict(plan.times)
        chosen = "retrieval" in plan.tiers and self._view.setting.budget.open
        self.plan, self.name, self.budget = plan, str(plan), self._view.budget if chosen else None
        self.changes += 1
        self.forget()

    def _judge(self, name: str, lengths: Sequence[int]) -> None:
        """What happened to the guesses of a tier in this proposal."""
        news_B2 = self._parts[name].counters.verdicts()
        if name == "draft":
            self._watch.add(name, max(lengths), *news_B2.sum(0).tolist())
        elif name == "ngram":
            part = self._parts[name]
            kept, predicted = int(news_B2[:, 0].sum()), self._asked * self._echo.of(part.gamma, part.below is None)[1]
            self._watch.add(name, max(lengths), kept, max(0.0, predicted - kept))
        elif name == "retrieval":
            bits_B = [length.bit_length() for length in lengths]
            for bits in set(bits_B):
                rows = [b for b, each in zip(self._live_B.nonzero()[0].tolist(), bits_B, strict=True) if each == bits]
                kept, refused = news_B2[rows].sum(0).tolist()
                self._watch.add(name, (1 << bits) - 1, kept, refused, self._view.times.get(bits, 1.0))

    def _outlook(self, lengths: Sequence[int], budgets: Sequence[Times]) -> Forecast:
        return Forecast(self.costs, self._watch, self._echo, self._view, lengths, budgets)
