"""When a controller listens and weighs plans, and what one text leaves to the next ones of its kind."""

from __future__ import annotations

import pytest

from tests.helpers.controlled_batch import DEEP, LIVE, known, read, steered
from triforce.engine.modes import unlinked
from triforce.planner import CostModel, Plan, PlanController, cadence, fallback
from triforce.speculation import SequenceState


def test_planning_takes_one_percent_of_time() -> None:
    ticks = iter(range(10**6))
    it, batch = steered(known(full=20e-3), steps=1, clock=lambda: 5e-4 * next(ticks))  # a thought takes a millisecond
    thoughts = [0, 0]
    for step in range(800):
        before = it.replanned_at
        it.observe([100], 1, 2e-3)
        it.steer(batch.prefix, LIVE)
        thoughts[step >= 400] += it.replanned_at != before
    assert 7 <= thoughts[1] <= 8 < thoughts[0] <= 10


def listening(
    monkeypatch: pytest.MonkeyPatch, costs: CostModel, hits: int = 0
) -> tuple[PlanController, SequenceState, list[bool]]:
    """A controller that gets so many hits each time it looks; and whether all plans were weighed, time by time."""
    ticks, weighed = iter(range(10**6)), list[bool]()
    batch = read(None)
    it = PlanController(unlinked(batch.top), costs, clock=lambda: 1e-5 * next(ticks))
    monkeypatch.setattr(it.hindsight, "update", lambda prefix, b: (1, hits))
    best = it.choose
    monkeypatch.setattr(it, "choose", lambda lengths, widely: weighed.append(widely) or best(lengths, widely))
    return it, batch.prefix, weighed


def goes_on(it: PlanController, prefix: SequenceState, steps: int) -> None:
    for _ in range(steps):
        it.steer(prefix, LIVE)
        it.by_name["full"].counters.record_passes(LIVE, 1e-4)
        it.observe([int(prefix.lengths_B[0])], 1, 1e-4)


def test_plain_text_without_signal_is_only_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    it, prefix, weighed = listening(monkeypatch, known(full=1e-4, draft=1e-4))
    goes_on(it, prefix, 60)
    assert weighed == [True] and it.replanned_at > 0 and it.plan == Plan()
    goes_on(it, prefix, 200)
    assert 2 <= len(weighed) <= 4 and all(weighed)


def test_plain_text_with_signal_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(hits: int) -> int:
        it, prefix, weighed = listening(monkeypatch, known(full=1e-4, draft=1e-4), hits)
        goes_on(it, prefix, 400)
        return weighed.count(False)

    assert times(cadence.MIN_HITS // 8) < times(cadence.MIN_HITS) and times(0) == 0


def test_similar_plain_texts_are_seldom_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, weighed = known(full=1e-4, draft=1e-4), list[list[bool]]()
    for _ in range(12):
        it, prefix, each = listening(monkeypatch, costs)
        weighed.append(each)
        goes_on(it, prefix, 30)
        assert it.plain > 0 and it.predicted == it.plain
        it.close(prefix)
    assert weighed[0] == [True] and 2 <= sum(map(len, weighed)) <= 4
    it, prefix, each = listening(monkeypatch, costs)
    it.acceptance.temperature += 1  # texts of another kind
    goes_on(it, prefix, 1)
    assert each == [True]


@pytest.mark.parametrize(("hits", "fewer"), [(0, True), (2 * cadence.MIN_HITS, False)])
def test_texts_without_signal_reduce_observation(hits: int, fewer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "MAX_NO_GAIN", 1)
    costs, heard = known(full=1e-4, draft=1e-4), list[int]()
    for _ in range(8):
        it, prefix, _ = listening(monkeypatch, costs, hits)
        times, tell = list[int](), it.hindsight.update
        monkeypatch.setattr(
            it.hindsight, "update", lambda *text, tell=tell, times=times: times.append(1) or tell(*text)
        )
        goes_on(it, prefix, 200)
        heard.append(len(times))
        it.close(prefix)
        assert len(times) == heard[-1] + 1  # to its end
    assert (heard[-1] < heard[0] / 2) == fewer


def test_text_with_signal_restores_observation() -> None:
    quiet = cadence.Cadence(due_at=1.0, quiet=cadence.MAX_QUIET)
    quiet.add_hits(8, cadence.MIN_HITS - 1)
    assert quiet.kept()[0] == 1.0 and quiet.kept()[3] == cadence.MAX_QUIET
    quiet.add_hits(8, 1)
    assert quiet.kept()[0] == 0.0 and quiet.kept()[3] == 1


def test_failed_speculation_lowers_trust_in_next_text() -> None:
    costs = known(full=20e-3)
    for off, plan in ((0.9, DEEP.tiers), (0.002, Plan().tiers)):
        it, batch = steered(costs, steps=1)
        assert it.plan.tiers == DEEP.tiers
        it.fallback.corrections[True], it.lengths = off, batch.prefix.lengths_B.tolist()
        it.close(batch.prefix)
        assert steered(costs, steps=1)[0].plan.tiers == plan


def test_single_bad_text_counts_half() -> None:
    it = fallback.SpeculationFallback()
    it.corrections[True] = fallback.CORRECTION_BOUNDS[0]
    assert fallback.CORRECTION_BOUNDS[0] < it.kept() < fallback.SpeculationFallback(it.kept()).kept() < 1
    again = fallback.SpeculationFallback(it.kept())
    again.corrections[True] = fallback.CORRECTION_BOUNDS[0]
    assert again.kept() < it.kept()


def test_batch_ending_before_proposal_is_not_remembered() -> None:
    for steps in (0, 1):
        costs = known(full=1e-4, draft=1e-4)
        it, batch = steered(costs, steps)
        it.close(batch.prefix)
        assert not costs.plain and not costs.trust


def test_short_plain_texts_teach_pass_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = known(full=1e-3, retrieval=2e-3, draft=1e-3)
    for _ in range(100):
        it, prefix, _ = listening(monkeypatch, costs)
        goes_on(it, prefix, 5)
        it.close(prefix)
    assert costs.seconds("full", 1, 1, 100) == pytest.approx(1e-4, rel=0.5)
