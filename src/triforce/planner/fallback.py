"""Holds what came beside what was predicted: speculation that loses to plain decoding has to make way for a while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WATCHED = 8, 16  # proposals that the measured speed is an average of: at least, and at most
GROUNDED = 4, 1024  # proposals of plain decoding after speculation lost: at first, and at most
LASTS = 0.9  # of what is remembered, in the next text
BOUNDS = 0.5, 1.5  # of the factors by which what was predicted proves to be off


@dataclass(slots=True)
class Throughput:
    """Some proposals, one after another, and the tokens of each row that they gave."""

    tokens: float = 0.0
    seconds: float = 0.0
    proposals: int = 0

    def take(self, tokens: float, seconds: float, proposals: int = 1) -> None:
        """What so many proposals more gave, and took."""
        self.tokens += tokens
        self.seconds += seconds
        self.proposals += proposals

    def loses_to(self, rate: float) -> bool:
        """Whether so many tokens a second would have been more."""
        return self.tokens < self.seconds * rate


class SpeculationFallback:
    """Of one batch. Rates are tokens per second of each row.

    trust: what speculation is taken to be worth of what is predicted, beside plain decoding, before it was tried.
    """

    def __init__(self, trust: float = 1.0) -> None:
        self._trust = trust
        self._rest = GROUNDED[0]
        self._off = {False: 1.0}  # what plain decoding and, once tried, speculation are worth, of what was predicted
        self._latest: deque[Throughput] = deque()

    def off(self, speculation: bool) -> float:
        """Times what is predicted, that is what comes.

        Before it was tried, speculation is taken to be off as far as plain decoding, as both wait for one machine, and
        as far beside it as in other texts.
        """
        return self._off[speculation] if speculation in self._off else self._trust * self._off[False]

    def kept(self) -> float:
        """The trust for the next text of the kind: only what came short is remembered, each time less of it.

        It is the mean of what it was and what this text showed, whose last proposals may have met a busy machine.
        """
        return float(min(1.0, self._trust * self.off(True) / self.off(False)) ** (LASTS / 2))

    def restart(self) -> None:
        """Other tiers speculate from now on."""
        self._latest.clear()

    def plain(self, run: Throughput, costed: float) -> float:
        """What plain decoding gave, beside the rate that costs of passes say; the rate to expect from now on."""
        self._correct(False, run.tokens / run.seconds / (self.off(False) * costed), run.proposals)
        return self.off(False) * costed

    def speculated(self, news: Throughput, predicted: float, plain: float) -> int:
        """What speculation gave; if it lost to plain decoding, for how many proposals that is to go on, else 0."""
        self._latest.append(news)
        run = Throughput()
        for each in self._latest:
            run.take(each.tokens, each.seconds, each.proposals)
        if run.proposals < WATCHED[0]:
            return 0
        if run.proposals - self._latest[0].proposals >= WATCHED[1]:
            self._latest.popleft()
        if predicted:
            self._correct(True, run.tokens / run.seconds / predicted, news.proposals)
        if not run.loses_to(plain):
            self._rest = GROUNDED[0]
            return 0
        rest, self._rest = self._rest, min(2 * self._rest, GROUNDED[1])
        return rest

    def _correct(self, speculation: bool, ratio: float, proposals: int) -> None:
        """What came was so many times what was predicted; one proposal says little."""
        now = self.off(speculation) * ratio ** min(1.0, proposals / WATCHED[0])
        self._off[speculation] = min(BOUNDS[1], max(BOUNDS[0], now))
