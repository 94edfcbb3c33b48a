"""Steers a batch: before each proposal of the exact tier it may choose another plan, from what has been seen so far.

What it knows: seconds of passes (`Costs`), which share of each tier's guesses was kept (`Watch`), and what the text
itself would have told (`Echo`). Under `seeded` no decision can change a text; under `rejection` none depends on a token
that is still to be drawn, so the law stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import numpy as np

from triforce.cache import Full, Retrieval
from triforce.planner.costs import Costs
from triforce.planner.echo import Echo
from triforce.planner.guard import WATCHED, Guard, Run
from triforce.planner.outlook import OTHER, Outlook, Times, keys_seen, options
from triforce.planner.plan import Amount, Plan, families, rate
from triforce.planner.shares import Watch
from triforce.ranks import ALONE, Ranks
from triforce.shapes import Bools
from triforce.speculation import Lookup, Prefix, Proposer, Tier
from triforce.speculation.count import REMEMBERED
from triforce.speculation.lookup import FAR

EVERY = 4  # proposals between two thoughts, at least
WORTH = 100.0  # times the time that a thought takes is spent until the next one
LESSON = 200.0  # and that learning from some proposals takes
PATIENT = 4  # thoughts of a batch until then: its first ones follow sooner
SOMETIMES = 4  # thoughts of which one weighs other budgets, too, or all plans while plain text goes on as such
BETTER = 1.04  # times the present plan's worth: less is not worth a change
SAFE = 1.15, 1.04  # times the worth of plain decoding: less is not worth the risk of leaving it, and of staying away
PROBE = 64  # proposals between two of plain decoding, so that its cost stays known

PLAIN = Plan()


class Pilot:
    """`top` is a ladder of all the tiers there are: full, retrieval and perhaps a draft.

    heat: the temperature of the texts. clock: what thoughts are timed with. Of several `ranks` all follow rank 0, as
    their clocks differ.
    """

    def __init__(
        self,
        top: Tier[Full],
        rows: int,
        costs: Costs,
        heat: float = 1.0,
        clock: Callable[[], float] = perf_counter,
        ranks: Ranks = ALONE,
    ) -> None:
        self.costs, self._clock, self._ranks = costs, clock, ranks
        lookup = Lookup(rows)
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
        self._view: Retrieval = self._parts["retrieval"].cache  # type: ignore[attr-defined]
        self._times: dict[int, float] = {}
        self._live_B: Bools = np.zeros(rows, bool)
        self.foretold = 0.0
        self.plain = 0.0
        """Tokens per second of each row that are expected of the course, and of plain decoding; 0: not known yet."""
        self.name = str(PLAIN)
        self._echo, self._watch = Echo(lookup), Watch(costs.shares, heat)
        self._grain = top.cache.grain
        self._guard = Guard()
        self._steps = self._thought = self._thoughts = 0
        self._course = self.plan
        self._calm = False  # nothing is guessed, nor is anything about to be
        self._since, self._pause = 0.0, 0.0
        self._asked = 0  # how often lookup was, for a row, in the proposals that are learnt from
        self._study = 0.0  # seconds that it took to learn from the latest proposals
        self._news = Run()

    def steer(self, prefix: Prefix, live_B: Bools) -> None:
        """Wire the ladder for the next proposal."""
        thinks = self._steps == 0 or (self._steps - self._thought >= EVERY and self._since >= self._pause)
        if self._ranks.agree(thinks) or not self._calm:
            self._decide(prefix, live_B, thinks)
        self._steps += 1
        self._guard.grounded -= 1

    def _decide(self, prefix: Prefix, live_B: Bools, thinks: bool) -> None:
        if thinks:
            self._think(prefix, live_B)
        probing = self._steps % PROBE == PROBE - 1 and not self._course.plain
        wanted = PLAIN if probing or self._guard.grounded > 0 else self._course
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

    def learn(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """After a proposal from texts of these lengths, which gave so many tokens in all."""
        self._since += seconds
        self._news.take(taken / len(lengths), seconds)
        if not self._is_due():
            return
        began = self._clock()
        self.time(lengths, self._news.seconds)
        if self.plan.plain:
            costed = 1 / self.costs.seconds("full", 1, len(lengths), sum(lengths))
            self.plain = self._guard.plain(self._news, costed)  # as it was just tried
        else:
            self._watch.fade(max(lengths), self._news.proposals)
            for name in self.plan.tiers[:-1]:
                self._judge(name, lengths)
            if self._guard.speculated(self._news, self.foretold, self.plain):
                self._pause, self._thoughts = 0.0, max(self._thoughts, PATIENT)  # what led here is worth a thought more
        self._news, self._study = Run(), self._clock() - began

    def _is_due(self) -> bool:
        """Whether to look at the latest proposals: many at a time, where one is short against the time that it takes.

        Sooner if plain decoding was just tried, or if what was guessed loses to it; where plain text goes on as such,
        before the next thought.
        """
        if self._calm:
            return self._since >= self._pause or self._news.proposals >= REMEMBERED
        if self._news.seconds >= LESSON * self._study:
            return True
        if self.plan.plain:
            return self._guard.grounded < 0
        return self._news.proposals == WATCHED[0] and self._news.loses_to(self.plain)

    def time(self, lengths: Sequence[int], seconds: float) -> None:
        """Learn what the passes of some proposals took.

        What was done between them is shared among them: it would not have been without.
        """
        passes = {name: self._parts[name].counters.fresh() for name in self.plan.tiers}
        self._asked = sum(rows for _, rows, _ in passes.get("lookup", ()))
        count = sum(len(some) for some in passes.values())
        between = max(0.0, seconds - sum(took for some in passes.values() for *_, took in some)) / max(1, count)
        for name, some in passes.items():
            of_row = keys_seen(name, lengths, self._view) / len(lengths)
            alike: dict[tuple[int, int], list[float]] = {}
            for width, rows, took in some:
                alike.setdefault((width, rows), []).append(took)
            for (width, rows), each in alike.items():
                self.costs.observe(name, width, rows, of_row * rows, median(each) + between, len(each))

    def budget(self, context: int) -> int | None:
        """What the retrieval tier reads of so many tokens, where that is chosen, too."""
        chosen = "retrieval" in self.plan.tiers and self._view.setting.budget.open
        return self._view.budget(context) if chosen else None

    def forget(self) -> None:
        """The latest proposals are not to be learnt from."""
        self._news = Run()
        for part in self.tiers:
            part.counters.fresh()

    def _think(self, prefix: Prefix, live_B: Bools) -> None:
        """Choose a course. Thoughts are not worth more than a hundredth of the time, but for a text's first ones."""
        rows = live_B.nonzero()[0].tolist()
        began = self._clock()
        self._echo.listen(prefix, rows[self._steps % len(rows)])
        self._course = self._best(prefix.lengths_B[live_B].tolist())
        self._thoughts += 1
        patience = WORTH * min(1.0, self._thoughts / PATIENT)
        self._pause, self._since, self._thought = patience * (self._clock() - began), 0.0, self._steps

    def _best(self, lengths: list[int]) -> Plan:
        """The plan that is worth most, or the one that is followed if that is about as good.

        Where plain text goes on as such, most thoughts are about guesses from the text: what else there is has not
        changed.
        """
        wide = self._thoughts % SOMETIMES == 0
        deep = wide or not self._course.plain
        less = deep and any(length > self._view.budget(length) for length in lengths)
        budgets = options(self._view, self._times, lengths) if less else [{}]
        budgets = budgets if wide else budgets[:1]
        world = self._outlook(lengths, budgets)
        exact = world.cost("full", 1)
        self.plain = self._guard.off(False) / exact
        less = less and np.min(world.cost("retrieval", 1)) < exact
        best, highest, present = PLAIN, self.plain, self.plain
        for tiers, gammas in families(deep and "draft" in self._parts, less):
            if "lookup" in tiers and not world.echo(1, tiers[0] == "lookup")[2]:
                continue
            worth_KN = self._worth(tiers, gammas, world)
            if tiers == self._course.tiers:
                present = float(self._worth(tiers, self._course.gammas, world)[0, 0])
            k, at = divmod(int(worth_KN.argmax()), worth_KN.shape[1])
            if worth_KN[k, at] > highest:
                times = tuple(sorted(budgets[k].items())) if "retrieval" in tiers else ()
                best, highest = Plan(tiers, tuple(int(each[at]) for each in gammas), times), float(worth_KN[k, at])
        needed = SAFE[not self._course.plain] * self.plain
        if highest < needed:
            best, highest = PLAIN, self.plain
        if not best.plain and present > needed and highest < BETTER * present:
            best, highest = self._course, present
        self.foretold = highest * OTHER ** len(best.times)
        return best

    def _worth(self, tiers: tuple[str, ...], gammas: Sequence[Amount], world: Outlook) -> np.ndarray:
        """Of plans of these tiers, tokens per second as things proved so far, by budget and gammas."""
        worth_KN = np.atleast_2d(rate(tiers, tuple(gammas), world)) * self._guard.off(True)
        return worth_KN / world.caution if "retrieval" in tiers else worth_KN

    def wire(self, plan: Plan, prefix: Prefix, live_B: Bools) -> None:
        """Let the ladder follow a plan."""
        below: Proposer | None = None
        for name, gamma in zip(plan.tiers, (*plan.gammas, 1), strict=True):
            part = self._parts[name]
            part.gamma = gamma
            if isinstance(part, Tier):
                part.below = below
                if name not in self.plan.tiers:
                    part.catch_up(prefix, live_B & (prefix.lengths_B - part.cache.lengths_B > FAR))
            elif isinstance(part, Lookup):
                part.below = below if isinstance(below, Tier) else None
            below = part
        if plan.tiers != self.plan.tiers:
            self._guard.restart()
        if "retrieval" in plan.tiers:
            self._view.times = dict(plan.times)
        self.plan, self.name = plan, str(plan)
        self.forget()

    def _judge(self, name: str, lengths: Sequence[int]) -> None:
        """What happened to the guesses of a tier in this proposal."""
        news_B2 = self._parts[name].counters.verdicts()
        if name == "draft":
            self._watch.add(name, max(lengths), *news_B2.sum(0).tolist())
        elif name == "lookup":
            part = self._parts[name]
            kept, foretold = int(news_B2[:, 0].sum()), self._asked * self._echo.of(part.gamma, part.below is None)[1]
            self._watch.add(name, max(lengths), kept, max(0.0, foretold - kept))
        elif name == "retrieval":
            bits_B = [length.bit_length() for length in lengths]
            for bits in set(bits_B):
                rows = [b for b, each in zip(self._live_B.nonzero()[0].tolist(), bits_B, strict=True) if each == bits]
                kept, refused = news_B2[rows].sum(0).tolist()
                self._watch.add(name, (1 << bits) - 1, kept, refused, self._view.times.get(bits, 1.0))

    def _outlook(self, lengths: Sequence[int], budgets: Sequence[Times]) -> Outlook:
        return Outlook(self.costs, self._watch, self._echo, self._view, lengths, budgets)
