"""Steers a batch: before each proposal of the exact tier it may choose another plan, from what has been seen so far.

What it knows: seconds of passes (`Costs`), and of each guesser's tokens which share was kept by whom. Under `seeded` no
decision can change a text; under `rejection` none depends on a token that is still to be drawn, so the law stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from triforce.cache import Full
from triforce.planner.costs import Costs
from triforce.planner.plan import Plan, plans
from triforce.ranks import ALONE, Ranks
from triforce.shapes import Bools
from triforce.speculation import Lookup, Prefix, Proposer, Tier

EVERY = 8  # proposals between two thoughts
BETTER = 1.05  # times the present plan's worth: less is not worth a change
SAFE = 1.1  # times the worth of plain decoding: less is not worth the risk
PROBE = 64  # proposals between two of plain decoding, so that its cost stays known
WATCHED = 8, 16  # proposals that the measured speed is an average of: at least, and at most
GROUNDED = 32, 1024  # proposals of plain decoding after speculation lost: at first, and at most
EXPECTED = {"lookup": 0.5, "draft": 0.6, "retrieval": 0.93}  # shares kept, before anything was seen
BELIEF = 4.0  # guesses' worth of it
FADE = 0.98  # of what was kept and refused, per proposal


class Pilot:
    """`top` is a ladder of all the tiers there are: full, retrieval and perhaps a draft.

    Of several `ranks` all follow rank 0: their clocks differ.
    """

    def __init__(self, top: Tier[Full], rows: int, costs: Costs, ranks: Ranks = ALONE) -> None:
        self.costs, self._ranks = costs, ranks
        below: list[Proposer] = [Lookup(rows)]
        tier: Proposer | None = top
        while tier:
            below.insert(1, tier)
            tier = tier.below
        self.tiers = below
        for level, part in enumerate(self.tiers):
            part.level = level  # tells them apart in the noise, and in the origins of tokens
        self._parts = {part.name: part for part in self.tiers}
        self.plan, top.below = Plan(), None
        self._steps = self._grounded = 0
        self._rest = GROUNDED[0]
        self._course = self.plan
        self._kept: dict[tuple[str, str], list[float]] = {}
        self._counted = {name: (0, 0) for name in self._parts}
        self._speed: deque[tuple[int, float]] = deque(maxlen=WATCHED[1])

    def steer(self, prefix: Prefix, live_B: Bools) -> None:
        """Wire the ladder for the next proposal."""
        lengths = prefix.lengths_B[live_B].tolist()
        if self._steps % EVERY == 0:
            self._course = self._best(lengths)
        wanted = self._ranks.agree(Plan() if self._steps % PROBE == 0 or self._grounded > 0 else self._course)
        if wanted != self.plan:
            self.wire(wanted, prefix, live_B)
        self._steps += 1
        self._grounded -= 1

    def learn(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """After a proposal from texts of these lengths, which gave so many tokens in all.

        What was done between its passes is shared among them: they would not have been without.
        """
        passes = [(name, *one) for name, part in self._parts.items() for one in part.counters.fresh()]
        between = max(0.0, seconds - sum(took for *_, took in passes)) / max(1, len(passes))
        for name, tokens, took in passes:
            self.costs.observe(name, tokens, self._keys(name, lengths), took + between)
        for sums in self._kept.values():
            sums[:] = FADE * sums[0], FADE * sums[1]
        for below, tier in pairwise(self.plan.tiers):
            self._judge(below, tier)
        if self.plan != Plan():
            self._watch(lengths, taken, seconds)

    def forget(self) -> None:
        """The latest passes are not to be learnt from."""
        for part in self.tiers:
            part.counters.fresh()

    def acceptance(self, below: str, tier: str) -> float:
        """The share of guesses kept, of those looked at."""
        kept, refused = self._kept.get((below, tier), (0.0, 0.0))
        return (kept + BELIEF * EXPECTED[below]) / (kept + refused + BELIEF)

    def _best(self, lengths: list[int]) -> Plan:
        """The plan that is worth most, or the one that is followed if that is about as good."""
        lines = {name: self.costs.line(name, len(lengths), self._keys(name, lengths)) for name in self._parts}

        def cost(tier: str, tokens: float) -> float:
            base, each = lines[tier]
            return base + each * tokens

        worth = {plan: plan.rate(cost, self.acceptance) for plan in plans(self._has("draft"), self._sees_less(lengths))}
        best = max(worth, key=worth.__getitem__)
        if worth[best] < SAFE * worth[Plan()]:
            return Plan()
        return best if worth[best] > BETTER * worth.get(self._course, 0.0) else self._course

    def wire(self, plan: Plan, prefix: Prefix, live_B: Bools) -> None:
        """Let the ladder follow a plan."""
        for name, gamma in zip(plan.tiers, (*plan.gammas, 1), strict=True):
            self._parts[name].gamma = gamma
        below: Proposer | None = None
        for name in plan.tiers:
            part = self._parts[name]
            if isinstance(part, Tier):
                part.below = below
                if name not in self.plan.tiers:
                    part.catch_up(prefix, live_B)
            below = part
        self.plan = plan
        self._speed.clear()

    def _judge(self, below: str, tier: str) -> None:
        """What happened to the guesses of one tier since the last time."""
        counters, (kept, refused) = self._parts[below].counters, self._counted[below]
        now = counters.kept, counters.refused
        sums = self._kept.setdefault((below, tier), [0.0, 0.0])
        sums[:] = sums[0] + now[0] - kept, sums[1] + now[1] - refused
        self._counted[below] = now

    def _watch(self, lengths: Sequence[int], taken: int, seconds: float) -> None:
        """Plain decoding for a while, each time longer, if measured speed says that it is faster."""
        self._speed.append((taken, seconds))
        if len(self._speed) < WATCHED[0]:
            return
        tokens, took = map(sum, zip(*self._speed, strict=True))
        plain = self.costs.seconds("full", len(lengths), self._keys("full", lengths)) / len(lengths)
        if took > tokens * plain:
            self._grounded, self._rest = self._rest, min(2 * self._rest, GROUNDED[1])
        else:
            self._rest = GROUNDED[0]

    def _keys(self, tier: str, lengths: Sequence[int]) -> int:
        """Keys that a pass of a tier sees, of all rows; the draft's are always as many."""
        if tier == "full":
            return sum(lengths)
        if tier == "retrieval":
            return sum(self._parts["retrieval"].cache.keys(length) for length in lengths)  # type: ignore[attr-defined]
        return 0

    def _sees_less(self, lengths: Sequence[int]) -> bool:
        return any(length > self._budget(length) for length in lengths)

    def _budget(self, length: int) -> int:
        tokens: int = self._parts["retrieval"].cache.setting.budget.of(length)  # type: ignore[attr-defined]
        return tokens

    def _has(self, name: str) -> bool:
        return name in self._parts
