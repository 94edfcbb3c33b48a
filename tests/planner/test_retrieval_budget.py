"""The pilot chooses how much the retrieval tier reads where nobody asked for a number, by the size of a row."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.helpers.laws.tiny import MODELS, PROMPTS, SETTING
from tests.helpers.simulated_tiers import Silence, World, flown, worth
from tests.planner.test_known_optimum import LONG, MS
from triforce.engine.batch import Batch
from triforce.engine.modes import MODES
from triforce.engine.sequence import TokenSequence
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget, RetrievalConfig
from triforce.planner import CostModel, Plan, PlanController, forecast
from triforce.planner.forecast import TIMES, Forecast, options
from triforce.planner.plan import rate

OPEN = RetrievalConfig(Budget(64, open=True))
LONGER, SHORTER = (PROMPTS[0] * 3)[:400], PROMPTS[0]
DEEP = Plan(("draft", "retrieval", "full"), (2, 6))
CHEAP = LONG | {"draft": (0.1 * MS, 0.0), "retrieval": (0.5 * MS, 0.02 * MS)}


def world(*budgets: tuple[float, float]) -> World:
    """Of half, once and twice the budget: seconds more of a pass, and the share of guesses kept."""
    return World(CHEAP, {"draft": 0.5}, budgets=dict(zip(TIMES, budgets, strict=True)))


LARGER = world((0.05 * MS, 0.6), (0.1 * MS, 0.7), (0.2 * MS, 0.95))
SMALLER = world((0.7 * MS, 0.90), (1.4 * MS, 0.90), (2.8 * MS, 0.90))
EQUAL = world((0.05 * MS, 0.9), (0.1 * MS, 0.9), (0.2 * MS, 0.9))


def batch(*prompts: list[int], setting: RetrievalConfig = OPEN) -> Batch:
    jobs = [TokenSequence(prompt, SamplingParams(0.8, max_tokens=60), seed=1) for prompt in prompts]
    made = Batch(MODELS, MODES["auto"], replace(SETTING, retrieval=setting), "seeded", jobs)
    deque(made.prefill(), maxlen=0)
    return made


def informed(world: World) -> CostModel:
    """Passes of all tiers were seen, and of the retrieval tier with all budgets."""
    costs = CostModel()
    for times, tier, width in [(t, tier, width) for t in TIMES for tier in world.costs for width in (1, 3, 7) * 4]:
        world.times = times
        keys = OPEN.budget.of(400, times) if tier == "retrieval" else 400 * times
        costs.observe(tier, width, 1, keys, world.seen(tier, width))
    return costs


def followed(world: World, setting: RetrievalConfig = OPEN, proposals: int = 600) -> tuple[list[float], float]:
    """The budgets of all proposals, in times of the usual one; and tokens per second."""
    made, seen = batch(LONGER, setting=setting), []
    world.dice = random.Random(1)  # the same ones, whatever was played before
    it = PlanController(made.top, 1, informed(world), clock=lambda: 0.0)
    speed = 0.0
    for _ in range(proposals):
        speed += flown(it, made.prefix, world, 1) / proposals
        seen.append(world.times if "retrieval" in it.plan.tiers else 1.0)
    return seen, speed


@pytest.mark.parametrize(("given", "times"), [(LARGER, 2.0), (SMALLER, 0.5)], ids=["larger", "smaller"])
def test_a_budget_that_pays_is_found_and_kept(given: World, times: float) -> None:
    seen, speed = followed(given)
    assert np.mean(np.array(seen[100:]) == times) > 0.95
    asked, usual = followed(given, RetrievalConfig(Budget(64)))
    assert set(asked) == {1.0} and speed > 1.1 * usual  # a number that somebody gave is kept


def test_where_it_does_not_matter_it_stays_as_it_is() -> None:
    seen, _ = followed(EQUAL)
    assert np.mean(np.array(seen) == 1.0) > 0.8
    assert sum(a != b for a, b in pairwise(seen)) <= 8


def test_whoever_thought_too_well_of_the_untried_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce.planner.acceptance.FEWER", 3.0)
    seen, _ = followed(EQUAL)
    assert np.mean(np.array(seen[:50]) == 2.0) > 0.1


def test_a_little_more_is_no_reason_for_another_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "OTHER", 100.0)
    assert set(followed(LARGER)[0]) == {1.0}


@pytest.mark.parametrize(
    "setting",
    [RetrievalConfig(Budget(64)), replace(OPEN, refresh=0), replace(OPEN, refresh=None)],
    ids=["given", "once", "auto"],
)
def test_nothing_is_chosen_where_it_was_asked_for_or_could_not_be_followed(setting: RetrievalConfig) -> None:
    it = PlanController(batch(LONGER, setting=setting).top, 1, CostModel())
    assert options(it._view, {}, [400]) == [{}]


def test_other_budgets_are_one_step_away_and_no_more_than_half_the_context() -> None:
    view = PlanController(batch(LONGER).top, 1, CostModel())._view
    assert options(view, {}, [400]) == [{}, {9: 0.5}, {9: 2.0}]
    assert options(view, {9: 0.5}, [400]) == [{9: 0.5}, {}]
    assert options(view, {9: 2.0}, [400, 200]) == [{9: 2.0}, {8: 0.5, 9: 2.0}, {}]


def both() -> tuple[PlanController, Batch]:
    made = batch(LONGER, SHORTER)
    it = PlanController(made.top, 2, informed(LARGER), clock=lambda: 0.0)
    it._echo = Silence(LARGER)  # type: ignore[assignment]
    return it, made


def test_rows_of_one_batch_have_the_budget_of_their_size() -> None:
    it, made = both()
    for kept, times in ((80, 1.0), (97, 2.0)):
        it._watch.add("retrieval", 400, 10 * kept, 10 * (100 - kept), times)
    live_B = np.array([True, True])
    it.steer(made.prefix, live_B)
    assert it.plan.times == ((9, 2.0),) and "retrieval" in it.plan.tiers
    assert [it.budget(length) for length in (400, 150)] == [128, 64]
    made.pilot, made.tiers = it, it.tiers
    made.step()
    chosen = [choice.tokens for choice in it._view.choices if choice]
    assert 64 < chosen[0] <= 128 and chosen[1] <= 64
    assert [stretch.budget for job in made.jobs for stretch in job.timeline] == [128, 64]


def test_rows_teach_the_share_of_their_size() -> None:
    it, made = both()
    it.wire(replace(DEEP, times=((9, 2.0),)), made.prefix, np.array([True, True]))
    it._live_B, it._calm = np.array([True, True]), False
    it._parts["retrieval"].counters.judged(np.array([4, 4]), np.array([4, 1]), np.array([True, True]))
    it.learn([400, 150], 8, 0.02)
    assert it.costs.shares.sums["retrieval 3 9 x2"] == [4.0, 0.0]
    assert it.costs.shares.sums["retrieval 3 8"] == [1.0, 1.0]


def test_keys_that_were_never_varied_cost_what_those_of_the_exact_tier_do() -> None:
    it, _ = both()
    it.costs = CostModel()
    for width in (1, 3, 7) * 4:
        it.costs.observe("retrieval", width, 1, 64, 2 * MS)
        for keys in (100, 400):
            it.costs.observe("full", width, 1, keys, 3 * MS + keys * 0.01 * MS)
    it_sees = it.costs, it._watch, it._echo, it._view, [400]
    few, usual, many = (
        np.ravel(Forecast(*it_sees, [{}, {9: 0.5}, {9: 2.0}]).cost("retrieval", 1))[i] for i in (1, 0, 2)
    )
    assert (usual - few, many - usual) == pytest.approx((0.32 * MS, 0.64 * MS), rel=0.05)


def test_where_so_many_keys_were_never_read_they_cost_at_most_what_the_exact_tier_takes_for_them() -> None:
    """Passes of a short text, whose keys hardly vary, tell nothing of a long one: their line may point anywhere."""
    it, _ = both()
    it.costs, dice = CostModel(), random.Random(1)
    view, size = it._view, 400
    few, budget = 10, view.keys(size)

    def true(tokens: int, keys: float) -> float:
        return 1 * MS + (0.1 + 0.001 * keys) * tokens * MS

    def predicted() -> float:
        return float(np.ravel(Forecast(it.costs, it._watch, it._echo, view, [size]).cost("retrieval", 1))[0])

    for i in range(12):
        it.costs.observe("retrieval", 1 + i % 3, 1, few + i // 4, true(1 + i % 3, few) * (1 + 0.1 * (i // 4)))
        it.costs.observe("full", 1 + i % 3, 1, few, true(1 + i % 3, few))
    for _ in range(60):
        it.costs.observe("full", 1, 1, size, true(1, size))
    assert it.costs.seconds("retrieval", 1, 1, budget) > 1.5 * true(1, budget)
    assert predicted() == pytest.approx(true(1, budget), rel=0.2)
    dear = 3 * true(1, budget)
    for _ in range(20):
        it.costs.observe("retrieval", 1, 1, budget, dear * dice.uniform(0.9, 1.1))
    assert predicted() == pytest.approx(dear, rel=0.2)  # now it is known, whatever the exact tier takes


def test_the_worth_of_several_budgets_is_that_of_each() -> None:
    it, _ = both()
    budgets = options(it._view, {}, [400, 300, 150])
    how = it.costs, it._watch, it._echo, it._view, [400, 300, 150]
    together = np.ravel(rate(DEEP.tiers, DEEP.gammas, Forecast(*how, budgets)))
    alone = [worth(DEEP, Forecast(*how, [times])) for times in budgets]
    assert together == pytest.approx(alone) and len(set(alone)) == len(alone)
