"""Fallback to plain decoding: measured throughput against the predicted one, and what to do where speculation loses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 8, 16  # proposals that measured throughput is a mean of: at least, and at most
PAUSE = 4, 1024  # proposals of plain decoding after speculation lost: the first time, and at most
TRUST_DECAY = 0.9  # of what the next text remembers
CORRECTION_BOUNDS = 0.5, 1.5  # of measured throughput over the predicted one


@dataclass(slots=True)
class Throughput:
    """Some consecutive proposals: tokens of each row, and seconds."""

    tokens: float = 0.0
    seconds: float = 0.0
    proposals: int = 0

    def add(self, tokens: float, seconds: float, proposals: int = 1) -> None:
        """Count some proposals more."""
        self.tokens += tokens
        self.seconds += seconds
        self.proposals += proposals

    def loses_to(self, rate: float) -> bool:
        """Whether so many tokens per second would have been more."""
        return self.tokens < self.seconds * rate


class SpeculationFallback:
    """Corrections of predicted rates in one batch, and pauses of speculation. Rates are tokens per second of each row.

    trust: the rate of speculation, before it was tried, over the predicted one, as far as plain decoding keeps its own.
    """

    def __init__(self, trust: float = 1.0) -> None:
        self._trust = trust
        self._pause = PAUSE[0]
        self.corrections = {False: 1.0}  # of plain decoding, and of speculation (True) once it was tried
        self.window: deque[Throughput] = deque()  # the latest proposals of the same tiers

    def correction(self, speculation: bool) -> float:
        """The factor by which a predicted rate is to be multiplied.

        Untried speculation is corrected like plain decoding, as both wait for one machine, and by what others showed.
        """
        if speculation in self.corrections:
            return self.corrections[speculation]
        return self._trust * self.corrections[False]

    def kept(self) -> float:
        """The trust for the next text of the kind: shortfalls alone are remembered, each time less of them.

        It is the geometric mean of the old one and this text's, whose last proposals may have met a busy machine.
        """
        return float(min(1.0, self._trust * self.correction(True) / self.correction(False)) ** (TRUST_DECAY / 2))

    def observe_plain(self, measured: Throughput, costed: float) -> float:
        """Correct the rate of plain decoding, which is `costed` by its passes; returns the rate to expect."""
        self._correct(False, measured.tokens / measured.seconds / (self.correction(False) * costed), measured.proposals)
        return self.correction(False) * costed

    def observe_speculation(self, latest: Throughput, predicted: float, plain: float) -> int:
        """Correct the rate of speculation; returns for how many proposals to pause it, 0 unless it lost to `plain`."""
        self.window.append(latest)
        measured = Throughput()
        for each in self.window:
            measured.add(each.tokens, each.seconds, each.proposals)
        if measured.proposals < WINDOW[0]:
            return 0
        if measured.proposals - self.window[0].proposals >= WINDOW[1]:
            self.window.popleft()
        if predicted:
            self._correct(True, measured.tokens / measured.seconds / predicted, latest.proposals)
        if not measured.loses_to(plain):
            self._pause = PAUSE[0]
            return 0
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE[1])
        return pause

    def _correct(self, speculation: bool, ratio: float, proposals: int) -> None:
        """Multiply a correction by measured over predicted throughput; few proposals count in part."""
        now = self.correction(speculation) * ratio ** min(1.0, proposals / WINDOW[0])
        self.corrections[speculation] = min(CORRECTION_BOUNDS[1], max(CORRECTION_BOUNDS[0], now))
