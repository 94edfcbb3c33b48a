"""Planner of mode `auto`: chooses which tiers draft and how many tokens, by cost of passes and acceptance.

docs/design/planner.md defines the planner's words: account, score, kind, case, band of temperature, size of a text,
round, place, loop, scan, weigh plans, backoff, headroom.
"""

from triforce.planner.controller import PlanController, report
from triforce.planner.cost_model import CostModel
from triforce.planner.forecast import TokensToCome
from triforce.planner.plan import Plan, PlannedProposal
from triforce.planner.searched_layers import Findings, SearchedLayers

__all__ = [
    "CostModel",
    "Findings",
    "Plan",
    "PlanController",
    "PlannedProposal",
    "SearchedLayers",
    "TokensToCome",
    "report",
]
