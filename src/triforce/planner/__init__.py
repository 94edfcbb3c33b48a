"""Which tiers to run, and how far each guesses: decided from what passes cost and what was accepted so far."""

from triforce.planner.costs import Costs
from triforce.planner.focus import Focus
from triforce.planner.pilot import Pilot
from triforce.planner.plan import Plan

__all__ = ["Costs", "Focus", "Pilot", "Plan"]
