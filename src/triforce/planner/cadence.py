"""Cadence: when to look for n-grams in the text, and when to weigh plans. Each takes its part of the time.

Behind short prompts a step takes a third of a millisecond, and weighing plans takes as long. While plain decoding is
best, the text is only listened to, which takes little. Time that one text has left goes over to the next of its kind.
"""

from __future__ import annotations

from triforce.planner.plan import Plan
from triforce.planner.planner_config import CONFIG

FIRST_THOUGHTS = 4  # of a batch, until when they follow each other sooner
MAX_PATIENCE = 4  # times as long until plans are weighed, at most, where plain decoding stays best
MAX_QUIET = 4  # times as long until a text is listened to, at most, after as many of its kind that won nothing
MAX_VAIN = 4  # times `heard_tokens`, at most, after as many calls of n-grams that led to nothing
LESS_VAIN = 0.9  # part of it that is left after a text of the kind without a call

Waits = tuple[float, float, int, float, int, float]
"""Seconds until it is time to listen, and to think; how quiet texts are, how vain; patience; seconds of a thought."""


class Cadence:
    """The cadence of one batch. elapsed: seconds of decoding; due_at: when it is time to listen, or to think."""

    def __init__(self) -> None:
        self.elapsed = self.due_at = self.listen_at = self.think_at = 0.0
        self._thoughts = self._heard = 0
        self._vain, self._called = 1.0, False  # times `heard_tokens` that make a call; whether there was one
        self._quiet, self._predicted = 1, 0  # times as long until it is listened to; tokens predicted
        self._took = 0.0  # seconds, of weighing all plans
        self._patience = 1  # times as long until plans are weighed, as plain decoding was best so often

    @property
    def calls(self) -> bool:
        """Whether n-grams predicted so much of the text that plans are to be weighed at once."""
        return self._heard >= CONFIG.heard_tokens * self._vain

    @property
    def thinks(self) -> bool:
        """Whether it is time to weigh all plans."""
        return self.elapsed >= self.think_at

    def heard(self, hits: int, seconds: float) -> None:
        """Note tokens that n-grams predicted; hearing of them took so many seconds."""
        self._heard, self._predicted = self._heard + hits, self._predicted + hits
        repeats = self._predicted >= CONFIG.heard_tokens * self._vain
        self.listen_at = self.elapsed + CONFIG.listen_ratio * seconds * (1 if repeats else self._quiet)
        self.due_at = min(self.listen_at, self.think_at)

    def thought(self, seconds: float, plan: Plan, quick: bool) -> None:
        """Note that weighing plans took so many seconds, and which one was best. quick: n-grams alone were weighed."""
        listens = "ngram" not in plan.tiers
        self._called |= self.calls
        self._vain = min(self._vain + self.calls, MAX_VAIN)
        self._heard, pause = 0, CONFIG.think_ratio * seconds
        if not quick:
            self._took = seconds
            self._thoughts += 1
            stays = plan.plain and self._thoughts > FIRST_THOUGHTS
            self._patience = min(self._patience + 1, MAX_PATIENCE) if stays else 1
            self.think_at = self.elapsed + pause * min(self._patience, self._thoughts / FIRST_THOUGHTS)
        self.due_at = min(self.listen_at, self.think_at) if listens else self.think_at

    def resume(self, waits: Waits, seconds: float) -> None:
        """Go on where a text of the kind ended; this one may take so many seconds."""
        self.listen_at, self.think_at, self._quiet, self._vain, self._patience, self._took = waits
        self._thoughts = FIRST_THOUGHTS
        if seconds > CONFIG.think_ratio * self._took * self._patience / 2:
            self.think_at = 0.0
        self.due_at = min(self.listen_at, self.think_at)

    def left(self, won: bool) -> Waits:
        """Times and patience with which the next text of the kind goes on. won: whether speculation paid here."""
        listen_in, think_in = (max(0.0, at - self.elapsed) for at in (self.listen_at, self.think_at))
        if won:
            return 0.0, think_in, 1, 1.0, self._patience, self._took
        vain = self._vain if self._called else max(1.0, LESS_VAIN * self._vain)
        return listen_in, think_in, min(self._quiet + 1, MAX_QUIET), vain, self._patience, self._took
