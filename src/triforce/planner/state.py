"""States of the planner: the reason for the plan of the latest proposal."""

from __future__ import annotations

from enum import Enum

from triforce.planner.plan import Plan


class PlannerState(Enum):
    """The reason for the plan of the latest proposal."""

    EXPLORING = "exploring"
    """Costs are not known yet; prepared plans show them."""
    IDLE_PLAIN = "idle plain"
    """Plain decoding is best; the text is only watched for n-grams that repeat."""
    SPECULATING = "speculating"
    """The current plan is followed."""
    PROBING = "probing"
    """One proposal of plain decoding keeps its cost known."""
    FALLBACK = "fallback"
    """Speculation lost to plain decoding, which goes on for some proposals."""
    AWAITING_ATTENTION = "awaiting attention"
    """The full tier decodes once more, as retrieval selects by the attention that it observes."""


def state_of(followed: Plan, current: Plan, probing: bool, falls_back: bool) -> PlannerState:
    """The state in which a plan is followed where `current` is the one that was chosen."""
    if not followed.plain:
        return PlannerState.SPECULATING
    if current.plain:
        return PlannerState.IDLE_PLAIN
    if falls_back or probing:
        return PlannerState.FALLBACK if falls_back else PlannerState.PROBING
    return PlannerState.AWAITING_ATTENTION
