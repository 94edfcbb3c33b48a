"""Cadence: when to look for n-grams in the text, and when to weigh plans. Each takes its part of the time.

Behind short prompts a step takes a third of a millisecond, and weighing plans takes longer. While plain decoding is
best, the text is only listened to, which takes little. Time that one text has left goes over to the next of its kind.
"""

from __future__ import annotations

from triforce.planner.choose import Cause
from triforce.planner.plan import Plan
from triforce.planner.planner_config import CONFIG


class Cadence:
    """The cadence of one batch. elapsed: seconds of decoding; due_at: when it is time to listen, or to weigh plans.

    patience: times as long until plans are weighed. It grows while plain decoding stays best, in this text and in the
    next ones of its kind. From 1 on, as many times less is listened, too, and as many more n-grams call for a thought.
    """

    def __init__(self) -> None:
        self.elapsed = self.due_at = self.listen_at = self.think_at = 0.0
        self.patience, self._took, self._heard = 0.0, 0.0, 0

    @property
    def cause(self) -> Cause | None:
        """Reason to weigh plans now: it is time, or n-grams predicted much of the text since; None: there is none."""
        if self.elapsed >= self.think_at:
            return Cause.TIME
        return Cause.REPEATS if self._heard >= CONFIG.heard_tokens * max(1.0, self.patience) else None

    def heard(self, hits: int, seconds: float, least: float) -> None:
        """Note tokens that n-grams predicted; hearing of them took so many seconds. least: until there is a place."""
        self._heard += hits
        self.listen_at = self.elapsed + max(least, CONFIG.listen_ratio * seconds * max(1.0, self.patience))
        self.due_at = min(self.listen_at, self.think_at)

    def thought(self, seconds: float, plan: Plan) -> None:
        """Note that weighing plans took so many seconds, and which one was best."""
        self._took, self._heard = seconds, 0
        most = CONFIG.most_patience if plan.plain else 1.0
        self.patience = min(self.patience + CONFIG.patience_step, most)
        self.think_at = self.elapsed + CONFIG.think_ratio * seconds * self.patience
        self.due_at = self.think_at if "ngram" in plan.tiers else min(self.listen_at, self.think_at)

    def next(self, won: bool, seconds: float) -> Cadence:
        """The cadence of the next text of the kind, which may take so many seconds. won: whether this one paid.

        What is left of the waits goes over; a text that takes long weighs plans at once.
        """
        following = Cadence()
        following.patience, following._took = min(self.patience, 1.0) if won else self.patience, self._took
        if not won:
            following.listen_at = max(0.0, self.listen_at - self.elapsed)
        if seconds <= CONFIG.think_ratio * self._took * self.patience / 2:
            following.think_at = max(0.0, self.think_at - self.elapsed)
        following.due_at = min(following.listen_at, following.think_at)
        return following
