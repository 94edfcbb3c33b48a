"""Batches with plans by a controller, or at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.laws.tiny import MODELS, PROMPTS, SETTING
from tests.helpers.simulated_tiers import plans, steer
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, ModelSet, unlink_tiers
from triforce.interface.sampling_params import SamplingParams
from triforce.planner import CostModel, Plan, PlanController, controller
from triforce.planner import controller as planner_controller
from triforce.planner.forecast import BUDGET_STEPS, Choice
from triforce.planner.planner_config import CONFIG

PARAMS = SamplingParams(0.8, max_tokens=60)
ROWS = 2 * len(PROMPTS)
DEEP = Plan(("draft", "retrieval", "full"), (2, 6))
LIVE = np.array([True])


def controlled(coupling: str = "seeded", models: ModelSet = MODELS, rows: int = ROWS) -> SequenceBatch:
    return read(CostModel(), coupling, models, rows)


def read(costs: CostModel | None, coupling: str = "seeded", models: ModelSet = MODELS, rows: int = 1) -> SequenceBatch:
    """Return a prefilled batch with all tiers. Without costs it has no controller yet."""
    sequences = [TokenSequence(PROMPTS[b % len(PROMPTS)], PARAMS, seed=1234, choice=b) for b in range(rows)]
    batch = SequenceBatch(models, MODES["auto"], SETTING, coupling, sequences, costs=costs)
    deque(prefill_batch(batch), maxlen=0)
    return batch


def with_random_budgets(plan: Plan, generator: random.Random, lengths: list[int]) -> Plan:
    """Return a plan with a random budget factor for each size of context."""
    sizes = sorted({length.bit_length() for length in lengths}) if "retrieval" in plan.tiers else []
    return replace(plan, budget_factors=tuple((bits, generator.choice(BUDGET_STEPS)) for bits in sizes))


@pytest.fixture
def random_plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Draw a plan and budgets at each proposal; return the list of drawn plans."""
    generator = random.Random(3)
    drawn = list[Plan]()

    def random_plan(self: PlanController, lengths: list[int], *amounts: object) -> Choice:
        plan = generator.choice(list(plans("draft" in self.by_name, True)))
        drawn.append(with_random_budgets(plan, generator, lengths))
        return Choice(drawn[-1])

    monkeypatch.setattr(PlanController, "choose", random_plan)
    replan_always(monkeypatch)
    return drawn


def replan_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let controllers replan before every proposal, also before the first of a process."""
    always = replace(CONFIG, replan_ratio=0.0, scan_ratio=0.0, first_proposals=0, first_seconds=0.0)
    monkeypatch.setattr(planner_controller, "CONFIG", always)
    monkeypatch.setattr(controller, "CONFIG", always)


def known(full: float, retrieval: float = 1e-3, draft: float = 1e-4) -> CostModel:
    costs = CostModel()
    for tokens in (1, 9) * 20:
        for tier, seconds in (("full", full), ("retrieval", retrieval), ("ngram", 5e-3)):
            costs.passes.observe(tier, tokens, 1, 100, seconds)
        costs.passes.observe("draft", tokens, 1, 0, tokens * draft)
    return costs


def steered(
    costs: CostModel, steps: int = 4, clock: Callable[[], float] = lambda: 0.0
) -> tuple[PlanController, SequenceBatch]:
    batch = read(None)
    controller = PlanController(unlink_tiers(batch.top), costs, clock=clock)
    batch.controller = controller
    batch.tiers = controller.tiers
    for _ in range(steps):
        steer(controller, batch.prefix)
    return controller, batch
