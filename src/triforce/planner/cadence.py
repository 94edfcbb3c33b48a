"""Cadence of replanning: when n-grams are looked for, when some plans are weighed, when all, and what comes before.

Each takes its part of the time. While plain decoding is best, plans are weighed once n-grams have predicted enough of
the text. That takes little time, but so does a step behind a short prompt. While costs are unknown, plans explore.
"""

from __future__ import annotations

from collections import deque

from triforce.planner.plan import PLAIN, Plan

REPLAN_RATIO = 100.0  # seconds of decoding for each second that weighing plans takes
WATCH_RATIO = 200.0  # seconds of decoding for each second that looking for n-grams takes, where plans are not weighed
FIRST_PLANS = 4  # times that plans are weighed in a batch until then: the first follow each other sooner
REVIEW_EVERY = 4  # weighings for one of all plans, other budgets included
MIN_HITS = 16  # tokens that n-grams of a plain text have to predict until plans are weighed
MAX_NO_GAIN = 4  # times `MIN_HITS`, at most, after as many weighings without a gain
MAX_QUIET = 4  # times as long until n-grams are looked for, at most, after as many texts of the kind without hits

PLAIN_PROPOSALS = 8  # of plain decoding, before the plans that explore
GAMMAS: dict[str, list[tuple[int, ...]]] = {"draft": [(2, 4), (2, 4), (4, 2)], "retrieval": [(4,), (4,)]}
"""Gammas of the plans that follow, by their lowest tier."""

Kept = tuple[float, float, int, int]
"""See `Cadence.kept`."""


class Cadence:
    """The cadence of one batch; the parameters are those of `kept`."""

    def __init__(self, due_at: float = 0.0, review_at: float = 0.0, no_gain: int = 1, quiet: int = 1) -> None:
        self.elapsed, self.due_at = 0.0, due_at
        """Seconds of decoding so far, and those at which replanning is due."""
        self._review_at, self._no_gain, self._quiet = review_at, no_gain, quiet
        self._plannings = self._hits = 0  # weighings so far, and hits since the last one
        self._all_places = self._all_hits = 0

    @property
    def due(self) -> bool:
        """Whether to look for n-grams, and perhaps to weigh plans."""
        return self.elapsed >= self.due_at

    @property
    def review_due(self) -> bool:
        """Whether to weigh all plans, whatever n-grams predict."""
        return self.elapsed >= self._review_at

    def add_hits(self, places: int, hits: int) -> bool:
        """Count tokens that n-grams predicted at so many places; returns whether they suffice to weigh plans."""
        self._hits += hits
        self._all_places, self._all_hits = self._all_places + places, self._all_hits + hits
        return self._hits >= MIN_HITS * self._no_gain

    def watched(self, seconds: float) -> None:
        """Set the next time: looking for n-grams took so many seconds."""
        self.due_at = self.elapsed + WATCH_RATIO * seconds * (1 if self._repeats else self._quiet)

    def planned(self, seconds: float, hits: bool, review: bool, no_gain: bool) -> None:
        """Set the next time: weighing plans took so many seconds.

        hits: they had sufficed. review: all plans were weighed. no_gain: plain decoding is best.
        """
        self._plannings, self._hits = self._plannings + 1, 0
        self._no_gain = min(self._no_gain + hits, MAX_NO_GAIN) if no_gain else 1
        pause = REPLAN_RATIO * seconds * min(1.0, self._plannings / FIRST_PLANS)
        if review:
            self._review_at = self.elapsed + REVIEW_EVERY * (REPLAN_RATIO * seconds if no_gain else pause)
        if not (review and no_gain):  # else `watched` has set it
            self.due_at = self.elapsed + pause

    def replan_now(self) -> None:
        """Make replanning due; later pauses are those of a batch that is past its first plans."""
        self.due_at, self._plannings = self.elapsed, max(self._plannings, FIRST_PLANS)

    def kept(self) -> Kept:
        """The parameters for the next text of the kind, as this one was plain to its end.

        Seconds until replanning, and until all plans are weighed; 1 + weighings without a gain, 1 + texts without hits.
        """
        review_in = max(0.0, self._review_at - self.elapsed)
        if self._repeats:
            return 0.0, review_in, self._no_gain, 1
        return max(0.0, self.due_at - self.elapsed), review_in, self._no_gain, min(self._quiet + 1, MAX_QUIET)

    @property
    def _repeats(self) -> bool:
        """Whether n-grams predicted so much of the text that they may pay soon, if they do not yet."""
        return self._all_hits >= max(MIN_HITS, self._all_places)


class Exploration:
    """Plans that show the cost of passes, narrow and wide. A text that ends within a few tokens needs no more."""

    def __init__(self, draft: bool) -> None:
        tiers = ("draft", "retrieval", "full") if draft else ("retrieval", "full")
        self._plans = deque(Plan(tiers, gammas) for gammas in GAMMAS[tiers[0]])

    @property
    def done(self) -> bool:
        return not self._plans

    def plan(self, proposals: int) -> Plan:
        """The next plan, after so many proposals."""
        return PLAIN if proposals < PLAIN_PROPOSALS else self._plans.popleft()

    @staticmethod
    def speculates_next(proposals: int) -> bool:
        """Whether the proposal after the next one speculates: the full tier then has to observe attention before."""
        return proposals >= PLAIN_PROPOSALS - 1
