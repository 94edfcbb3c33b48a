"""Planning of mode `auto`: which tiers draft, and how many tokens, by the cost of passes and by acceptance."""

from triforce.planner.controller import PlanController, report
from triforce.planner.cost_model import CostModel
from triforce.planner.plan import Plan, PlannedProposal
from triforce.planner.searched_layers import Findings, SearchedLayers

__all__ = ["CostModel", "Findings", "Plan", "PlanController", "PlannedProposal", "SearchedLayers", "report"]
