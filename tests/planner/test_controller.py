"""A pilot may decide what it likes: the text stays. And it decides for what was measured."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.laws.gtest import ALPHA, ranks, window_surprise
from tests.helpers.laws.tiny import MODELS, PROMPTS, SETTING, finished, laws, started
from tests.helpers.simulated_tiers import World, plans
from triforce.engine.batch import Batch
from triforce.engine.modes import MODES
from triforce.engine.sequence import TokenSequence
from triforce.engine.tier_builder import ModelSet
from triforce.interface.sampling_params import SamplingParams
from triforce.planner import CostModel, Plan, PlanController, cadence, choose, controller, fallback
from triforce.planner.forecast import BURST, TIMES
from triforce.speculation import SequenceState

PARAMS = SamplingParams(0.8, max_tokens=60)
ROWS = 2 * len(PROMPTS)
DEEP = Plan(("draft", "retrieval", "full"), (2, 6))
LIVE = np.array([True])


def piloted(coupling: str = "seeded", models: ModelSet = MODELS, rows: int = ROWS) -> Batch:
    return read(CostModel(), coupling, models, rows)


def read(costs: CostModel | None, coupling: str = "seeded", models: ModelSet = MODELS, rows: int = 1) -> Batch:
    """All tiers, their prompts read; without costs nobody steers them yet."""
    jobs = [TokenSequence(PROMPTS[b % len(PROMPTS)], PARAMS, seed=1234, choice=b) for b in range(rows)]
    batch = Batch(models, MODES["auto"], SETTING, coupling, jobs, costs=costs)
    deque(batch.prefill(), maxlen=0)
    return batch


def with_whims(plan: Plan, dice: random.Random, lengths: list[int]) -> Plan:
    """A plan with budgets as the dice have it, for each size of context."""
    sizes = sorted({length.bit_length() for length in lengths}) if "retrieval" in plan.tiers else []
    return replace(plan, times=tuple((bits, dice.choice(TIMES)) for bits in sizes))


@pytest.fixture
def whims(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Another plan at each proposal, drawn from all, with other budgets; those that were drawn."""
    dice, drawn = random.Random(3), list[Plan]()

    def whim(self: PlanController, lengths: list[int], widely: bool) -> Plan:
        drawn.append(with_whims(dice.choice(list(plans("draft" in self._parts, True))), dice, lengths))
        return drawn[-1]

    monkeypatch.setattr(PlanController, "_best", whim)
    monkeypatch.setattr(CostModel, "knows", lambda *_: True)
    monkeypatch.setattr(controller, "EVERY", 1)
    monkeypatch.setattr(cadence, "WORTH", 0.0)
    monkeypatch.setattr(cadence, "LISTEN", 0.0)
    return drawn


def plain() -> Tensor:
    return finished(started("ar", "seeded", PARAMS, ROWS))


def test_the_text_is_that_of_plain_decoding_whatever_is_decided(whims: list[Plan]) -> None:
    monkey = piloted()
    assert torch.equal(finished(monkey), plain())
    assert len({plan.tiers for plan in whims}) > 4


def test_and_without_a_draft_model(whims: list[Plan]) -> None:
    assert torch.equal(finished(piloted(models=ModelSet(MODELS.target))), plain())
    assert not any("draft" in plan.tiers for plan in whims)


def law_stays(coupling: str, whims: list[Plan], rows: int, bound: float) -> None:
    texts_BT = finished(piloted(coupling, rows=rows))
    laws_BTV = laws(texts_BT, PARAMS)
    likings_BTV = laws_BTV / (laws(texts_BT, PARAMS, MODELS.draft) + 1e-9)  # where a fault would show most
    p_value, least = window_surprise(ranks(texts_BT, laws_BTV, likings_BTV), 12, 2, 4)
    print(f"p = {p_value:.3f}; detectable total variation {least:.4f}")
    assert least < bound and p_value > ALPHA and len({plan.tiers for plan in whims}) > 3


@pytest.mark.parametrize("coupling", ["rejection", "block"])
def test_under_rejection_the_law_stays(coupling: str, whims: list[Plan]) -> None:
    law_stays(coupling, whims, 120, 0.08)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["rejection", "block"])
def test_and_the_law_of_many_texts(coupling: str, whims: list[Plan]) -> None:
    law_stays(coupling, whims, 300, 0.05)


def test_and_as_it_decides_itself() -> None:
    batch = piloted()
    assert torch.equal(finished(batch), plain())
    assert [tier.name for tier in batch.tiers] == ["ngram", "draft", "retrieval", "full"]
    assert {origin for job in batch.jobs for origin in job.origins} <= {tier.name for tier in batch.tiers}
    for job in batch.jobs:
        assert sum(stretch.tokens for stretch in job.timeline) == len(job.tokens)


def known(full: float, retrieval: float = 1e-3, draft: float = 1e-4) -> CostModel:
    costs = CostModel()
    for tokens in (1, 9) * 20:
        for tier, seconds in (("full", full), ("retrieval", retrieval), ("ngram", 5e-3)):
            costs.observe(tier, tokens, 1, 100, seconds)
        costs.observe("draft", tokens, 1, BURST, tokens * draft)
    return costs


def steered(costs: CostModel, steps: int = 4, clock: Callable[[], float] = lambda: 0.0) -> tuple[PlanController, Batch]:
    batch = read(None)
    it = PlanController(batch.top, 1, costs, clock=clock)
    batch.pilot, batch.tiers = it, it.tiers
    for _ in range(steps):
        it.steer(batch.prefix, LIVE)
    return it, batch


def test_slow_full_passes_are_worth_a_hierarchy_and_fast_ones_are_not() -> None:
    deep, _ = steered(known(full=20e-3))
    assert deep.plan.tiers == DEEP.tiers and deep.plan.gammas[1] >= 6
    flat, _ = steered(known(full=1e-4, draft=1e-4))
    assert flat.plan == Plan()


def test_little_gain_is_no_reason_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    it, batch = steered(known(full=20e-3))
    before = it.plan
    monkeypatch.setattr(choose, "BETTER", 100.0)
    it.costs = known(full=20e-3, draft=2e-4)
    for _ in range(2 * controller.EVERY):
        it.steer(batch.prefix, LIVE)
    assert it.plan == before


def test_plain_decoding_is_not_left_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "SAFE", (100.0, 100.0))
    it, batch = steered(known(full=20e-3), steps=1)
    for _ in range(controller.EVERY + 2):
        it.steer(batch.prefix, LIVE)
        assert it.plan == Plan()


def test_a_slow_machine_is_no_reason_to_speculate() -> None:
    it, batch = steered(known(full=2.4e-3, retrieval=5e-3, draft=1.4e-3))  # hardly worth less than plain decoding
    assert it.plan == Plan()
    for _ in range(3 * controller.EVERY * cadence.SOMETIMES):
        it.learn([100], 1, 4e-3)
        it.steer(batch.prefix, LIVE)
        assert it.plan == Plan()


def test_a_plan_that_proves_slower_than_plain_decoding_is_left_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "PROBE", 10**9)
    it, batch = steered(known(full=20e-3))
    course, rests = it.plan, []
    monkeypatch.setattr(
        PlanController, "_best", lambda self, lengths, widely: course
    )  # stubborn: only the guard is left
    for _ in range(3):
        while it.plan != Plan():
            it.learn([100], 1, 1.0)  # a second for a token
            it.steer(batch.prefix, LIVE)
        rests.append(0)
        while it.plan == Plan():
            it.learn([100], 1, 0.02)
            it.steer(batch.prefix, LIVE)
            rests[-1] += 1
    assert rests[0] >= fallback.GROUNDED[0] and rests[1] >= 2 * rests[0] - 1 and rests[2] >= 2 * rests[1] - 2


def test_plain_decoding_is_tried_now_and_then() -> None:
    it, batch = steered(known(full=20e-3), steps=0)
    seen = []
    for _ in range(3 * controller.PROBE):
        it.steer(batch.prefix, LIVE)
        seen.append(it.plan == Plan())
    assert 2 <= sum(seen) <= 6


def test_what_is_done_between_passes_is_shared_among_them() -> None:
    it, batch = steered(CostModel(), steps=1)
    it.wire(Plan(("draft", "full"), (1,)), batch.prefix, LIVE)
    for _ in range(20):
        it._parts["full"].counters.passed(LIVE, 1e-3)
        it._parts["draft"].counters.passed(LIVE, 2e-4)
        it.learn([100], 1, 1.6e-3)
    assert it.costs.seconds("full", 1, 1, 100) == pytest.approx(1.2e-3, rel=1e-3)
    assert it.costs.seconds("draft", 1, 1, BURST) == pytest.approx(4e-4, rel=1e-3)


def test_shares_kept_are_learnt_and_remembered_by_the_next_batch() -> None:
    costs = known(full=20e-3)
    it, _ = steered(costs)
    counters = it._parts["draft"].counters
    for _ in range(50):
        counters.judged(np.array([4]), np.array([0]), LIVE)
        it.learn([100], 1, 1e-3)
    assert it._watch.share("draft", 100) < 0.1
    assert steered(costs)[0]._watch.share("draft", 100) < 0.2
    fresh, _ = steered(known(full=20e-3))
    assert fresh._watch.share("draft", 100) > 0.6


def test_a_draft_that_was_left_out_sees_what_was_written_meanwhile() -> None:
    batch = piloted(rows=2)
    it, live_B = batch.pilot, np.array([True, True])
    assert it
    draft = it._parts["draft"]
    for written in (10, 100):
        longer = SequenceState(batch.prefix.ids_BS, batch.prefix.lengths_B + written)
        it.wire(Plan(), batch.prefix, live_B)
        before = draft.cache.lengths_B.copy()  # type: ignore[attr-defined]
        it.wire(DEEP, longer, live_B)
        seen = longer.lengths_B - 1 if written > 64 else before  # a few tokens it sees in its next pass
        assert (draft.cache.lengths_B == seen).all()  # type: ignore[attr-defined]


def test_where_attention_went_is_looked_at_only_for_who_needs_it() -> None:
    it, batch = steered(known(full=20e-3), steps=1)
    assert it.top.cache.grain > 0 and it.plan.tiers == DEEP.tiers
    it._course = Plan()
    it.steer(batch.prefix, LIVE)
    assert it.plan == Plan() and it.top.cache.grain == 0
    it._course, it._calm = DEEP, False
    it.steer(batch.prefix, LIVE)
    assert it.plan == Plan() and it.top.cache.grain > 0  # first the exact tier looks
    it.steer(batch.prefix, LIVE)
    assert it.plan == DEEP


def test_what_is_not_known_is_seen_in_the_first_text_and_only_there() -> None:
    """Plain decoding first, then every tier, wide and narrow; a text that ends before shows nothing."""
    paces = {"ngram": (2e-5, 0.0), "draft": (3e-4, 0.0), "retrieval": (1.6e-3, 1e-4), "full": (8e-3, 2e-4)}
    costs, world = CostModel(), World(paces, {"draft": 0.6, "retrieval": 0.95})
    it, batch = steered(costs, steps=0)
    tried: list[Plan] = []
    for _ in range(controller.PLAINLY + len(controller.FIRST["draft"])):
        it.steer(batch.prefix, LIVE)
        tried.append(it.plan)
        it.learn([100], *world.play(it.plan, it._parts))
    assert tried[: controller.PLAINLY] == [Plan()] * controller.PLAINLY
    assert [plan.gammas for plan in tried[controller.PLAINLY :]] == controller.FIRST["draft"]
    it.steer(batch.prefix, LIVE)
    assert costs.knows("full", "retrieval", "draft")
    for tier, width, keys in (("full", 1, 100), ("full", 7, 100), ("retrieval", 3, 48)):
        assert costs.seconds(tier, width, 1, keys) == pytest.approx(world.cost(tier, width), rel=0.2)
    assert steered(costs, steps=1)[0]._unseen is None
