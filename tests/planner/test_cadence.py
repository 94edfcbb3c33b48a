"""Times at which a controller scans n-grams and replans, and the state that a text leaves to later similar texts."""

from __future__ import annotations

import pytest

from tests.helpers.controlled_batch import LIVE, known, read, steered
from tests.helpers.simulated_tiers import steer
from triforce.engine.tier_builder import unlink_tiers
from triforce.planner import CostModel, Plan, PlanController
from triforce.planner.controller import Cadence
from triforce.planner.forecast import Cause, Choice, TokensToCome
from triforce.planner.planner_config import CONFIG
from triforce.speculation import SequenceState


def test_planning_takes_one_percent_of_time() -> None:
    ticks = iter(range(10**6))
    controller, batch = steered(known(full=20e-3), steps=1, clock=lambda: 5e-4 * next(ticks))
    replan_counts = [0, 0]
    choose = controller.choose
    for step in range(800):
        controller.choose = lambda *how, half=step >= 400: (  # type: ignore[method-assign]
            replan_counts.__setitem__(half, replan_counts[half] + 1) or choose(*how)  # type: ignore[func-returns-value]
        )
        controller.observe([100], 1, 2e-3)
        steer(controller, batch.prefix)
    assert 2 <= replan_counts[1] <= 4 <= replan_counts[0] <= 7


def scanning_controller(
    monkeypatch: pytest.MonkeyPatch, costs: CostModel, hits: int = 0
) -> tuple[PlanController, SequenceState, list[int], list[int]]:
    """Return a controller whose scans each find `hits` n-gram hits, its prefix, and records of scans and replans."""
    ticks = iter(range(10**6))
    scans = list[int]()
    weighed = list[int]()
    batch = read(None)
    controller = PlanController(unlink_tiers(batch.top), costs, clock=lambda: 1e-5 * next(ticks))
    monkeypatch.setattr(controller.beliefs.hindsight, "update", lambda prefix, b: scans.append(len(scans)) or hits)
    best = controller.choose

    def choose(lengths: list[int], to_come: TokensToCome, unread_tokens: int) -> Choice:
        weighed.append(sum(next(ticks) > 0 for _ in range(8)))  # replanning takes time
        return best(lengths, to_come, unread_tokens)

    monkeypatch.setattr(controller, "choose", choose)
    return controller, batch.prefix, scans, weighed


def decode_plainly(controller: PlanController, prefix: SequenceState, steps: int) -> None:
    for _ in range(steps):
        steer(controller, prefix, remaining_tokens=lambda: 20)
        controller.by_name["full"].counters.record_passes(LIVE, 1e-4)
        controller.observe([int(prefix.lengths_B[0])], 1, 1e-4)


def hopeless() -> CostModel:
    """Return costs under which no speculation pays."""
    return known(full=1e-4, retrieval=1e-3, draft=1e-3)


def test_plain_text_without_signal_is_only_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, prefix, scans, weighed = scanning_controller(monkeypatch, hopeless())
    decode_plainly(controller, prefix, 400)
    assert controller.plan == Plan() and controller.choice.state.name == "PLAIN"
    assert 2 <= len(weighed) <= 20 and len(scans) >= len(weighed)


def test_plain_text_with_signal_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(hits: int) -> int:
        controller, prefix, _, weighed = scanning_controller(monkeypatch, hopeless(), hits)
        decode_plainly(controller, prefix, 400)
        return len(weighed)

    assert times(0) < times(CONFIG.replan_hits)


def test_similar_plain_texts_are_seldom_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = hopeless()
    replan_counts = list[int]()
    for _ in range(12):
        controller, prefix, _, weighed = scanning_controller(monkeypatch, costs)
        decode_plainly(controller, prefix, 5)
        controller.close(prefix)
        replan_counts.append(len(weighed))
        assert controller.plain_rate > 0 and controller.choice.rate == controller.plain_rate
    assert replan_counts[0] >= 1 and sum(replan_counts) <= 6
    controller, prefix, _, weighed = scanning_controller(monkeypatch, costs)
    controller.beliefs.acceptance.temperature_band += 1  # texts of another kind
    decode_plainly(controller, prefix, 1)
    assert len(weighed) == 1


def test_kept_times_are_those_left_over() -> None:
    cadence = Cadence()
    cadence.elapsed = 1.0
    cadence.record_scan(0, 0.01, min_wait=0.0)
    cadence.record_replan(0.1, Plan())
    cadence.elapsed = 1.5
    following = cadence.for_next_text(won=False, seconds=0.0)
    assert following.scan_at == pytest.approx(0.01 * CONFIG.scan_ratio - 0.5)
    assert following.replan_at == pytest.approx(0.1 * CONFIG.replan_ratio * CONFIG.backoff_step - 0.5)
    assert cadence.for_next_text(won=True, seconds=0.0).scan_at == 0


def test_texts_that_seem_to_repeat_in_vain_are_asked_about_less() -> None:
    """Each text has as many hits at once as a prompt that ends with a passage of itself."""
    asked = list[bool]()
    cadence = Cadence()
    for _ in range(24):
        cadence = cadence.for_next_text(won=False, seconds=0.0)
        cadence.replan_at = 1e9  # only n-gram hits cause a replan
        cadence.record_scan(2 * CONFIG.replan_hits, 1e-5, min_wait=0.0)
        asked.append(cadence.cause is not None)
        if cadence.cause:
            assert cadence.cause is Cause.REPEATS
            cadence.record_replan(1e-3, Plan())
    assert asked[0] and 1 < sum(asked) <= 12 and not asked[-1]
    again = cadence.for_next_text(won=True, seconds=0.0)
    again.replan_at = 1e9
    again.record_scan(CONFIG.replan_hits, 1e-5, min_wait=0.0)
    assert again.cause


def test_long_text_is_planned_at_once_and_short_one_is_not() -> None:
    ended = Cadence()
    ended.record_replan(0.1, Plan())
    for seconds, waits in ((1.0, True), (100.0, False)):
        assert (ended.for_next_text(won=False, seconds=seconds).cause is None) is waits


def test_batch_ending_before_proposal_is_not_remembered() -> None:
    for steps in (0, 1):
        costs = hopeless()
        controller, batch = steered(costs, steps)
        controller.close(batch.prefix)
        assert not costs.state_by_text_kind


def test_short_plain_texts_teach_pass_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = known(full=1e-3, retrieval=2e-3, draft=1e-3)
    for _ in range(100):
        controller, prefix, _, _ = scanning_controller(monkeypatch, costs)
        decode_plainly(controller, prefix, 5)
        controller.close(prefix)
    assert costs.passes.seconds("full", 1, 1, 150) == pytest.approx(1e-4, rel=0.5)
