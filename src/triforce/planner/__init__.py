"""Which tiers to run, and how far each guesses: decided from what passes cost and what was accepted so far."""

from triforce.planner.controller import PlanController
from triforce.planner.cost_model import CostModel
from triforce.planner.plan import Plan
from triforce.planner.searched_layers import Findings, SearchedLayers

__all__ = ["CostModel", "Findings", "Plan", "PlanController", "SearchedLayers"]
