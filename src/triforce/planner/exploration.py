"""Plans for the first proposals of a machine that has no costs yet: plain decoding, then all tiers."""

from __future__ import annotations

from collections import deque

from triforce.planner.choose import PLAIN
from triforce.planner.plan import Plan

PLAIN_PROPOSALS = 8  # of plain decoding, before other plans
GAMMAS: dict[str, list[tuple[int, ...]]] = {"draft": [(2, 4), (2, 4), (4, 2)], "retrieval": [(4,), (4,)]}
"""Gammas of the plans that follow, by their lowest tier."""


class Exploration:
    """Plans that show the cost of passes, narrow and wide. Their tokens are as good as any.

    A text that ends within a few tokens shows nothing, and needs nothing.
    """

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
