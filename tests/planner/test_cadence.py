"""When a pilot listens and weighs plans, and what one text leaves to the next ones of its kind."""

from __future__ import annotations

import pytest

from tests.planner.test_controller import DEEP, LIVE, known, read, steered
from triforce.planner import CostModel, Plan, PlanController, cadence, fallback
from triforce.speculation import SequenceState


def test_thoughts_take_a_hundredth_of_the_time_once_the_first_ones_are_over() -> None:
    ticks = iter(range(10**6))
    it, batch = steered(known(full=20e-3), steps=1, clock=lambda: 5e-4 * next(ticks))  # a thought takes a millisecond
    thoughts = [0, 0]
    for step in range(800):
        before = it._thought
        it.learn([100], 1, 2e-3)
        it.steer(batch.prefix, LIVE)
        thoughts[step >= 400] += it._thought != before
    assert 7 <= thoughts[1] <= 8 < thoughts[0] <= 10


def listening(
    monkeypatch: pytest.MonkeyPatch, costs: CostModel, told: int = 0
) -> tuple[PlanController, SequenceState, list[bool]]:
    """A pilot that is told so many tokens each time it listens; and whether all plans were weighed, time by time."""
    ticks, weighed = iter(range(10**6)), list[bool]()
    batch = read(None)
    it = PlanController(batch.top, 1, costs, clock=lambda: 1e-5 * next(ticks))
    monkeypatch.setattr(it._echo, "listen", lambda prefix, b: (1, told))
    best = it._best
    monkeypatch.setattr(it, "_best", lambda lengths, widely: weighed.append(widely) or best(lengths, widely))
    return it, batch.prefix, weighed


def goes_on(it: PlanController, prefix: SequenceState, steps: int) -> None:
    for _ in range(steps):
        it.steer(prefix, LIVE)
        it._parts["full"].counters.passed(LIVE, 1e-4)
        it.learn([int(prefix.lengths_B[0])], 1, 1e-4)


def test_a_plain_text_that_tells_nothing_is_only_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    it, prefix, weighed = listening(monkeypatch, known(full=1e-4, draft=1e-4))
    goes_on(it, prefix, 60)
    assert weighed == [True] and it._thought > 0 and it.plan == Plan()
    goes_on(it, prefix, 200)
    assert 2 <= len(weighed) <= 4 and all(weighed)


def test_and_guesses_are_weighed_when_it_tells_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(told: int) -> int:
        it, prefix, weighed = listening(monkeypatch, known(full=1e-4, draft=1e-4), told)
        goes_on(it, prefix, 400)
        return weighed.count(False)

    assert times(cadence.TOLD // 8) < times(cadence.TOLD) and times(0) == 0


def test_what_one_plain_text_weighed_the_next_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, weighed = known(full=1e-4, draft=1e-4), list[list[bool]]()
    for _ in range(12):
        it, prefix, each = listening(monkeypatch, costs)
        weighed.append(each)
        goes_on(it, prefix, 30)
        assert it.plain > 0 and it.predicted == it.plain
        it.close(prefix)
    assert weighed[0] == [True] and 2 <= sum(map(len, weighed)) <= 4
    it, prefix, each = listening(monkeypatch, costs)
    it._watch._heat += 1  # texts of another kind
    goes_on(it, prefix, 1)
    assert each == [True]


@pytest.mark.parametrize(("told", "fewer"), [(0, True), (2 * cadence.TOLD, False)])
def test_where_texts_tell_nothing_the_next_ones_are_listened_to_less(
    told: int, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cadence, "IN_VAIN", 1)
    costs, heard = known(full=1e-4, draft=1e-4), list[int]()
    for _ in range(8):
        it, prefix, _ = listening(monkeypatch, costs, told)
        times, tell = list[int](), it._echo.listen
        monkeypatch.setattr(it._echo, "listen", lambda *text, tell=tell, times=times: times.append(1) or tell(*text))
        goes_on(it, prefix, 200)
        heard.append(len(times))
        it.close(prefix)
        assert len(times) == heard[-1] + 1  # to its end
    assert (heard[-1] < heard[0] / 2) == fewer


def test_one_text_that_tells_much_is_enough_to_listen_again() -> None:
    quiet = cadence.Cadence(listen=1.0, quiet=cadence.QUIET)
    quiet.hears(8, cadence.TOLD - 1)
    assert quiet.kept()[0] == 1.0 and quiet.kept()[3] == cadence.QUIET
    quiet.hears(8, 1)
    assert quiet.kept()[0] == 0.0 and quiet.kept()[3] == 1


def test_speculation_that_came_short_is_trusted_less_in_the_next_text() -> None:
    costs = known(full=20e-3)
    for off, plan in ((0.9, DEEP.tiers), (0.002, Plan().tiers)):
        it, batch = steered(costs, steps=1)
        assert it.plan.tiers == DEEP.tiers
        it._guard._off[True], it._lengths = off, batch.prefix.lengths_B.tolist()
        it.close(batch.prefix)
        assert steered(costs, steps=1)[0].plan.tiers == plan


def test_one_bad_text_counts_half() -> None:
    it = fallback.SpeculationFallback()
    it._off[True] = fallback.BOUNDS[0]
    assert fallback.BOUNDS[0] < it.kept() < fallback.SpeculationFallback(it.kept()).kept() < 1
    again = fallback.SpeculationFallback(it.kept())
    again._off[True] = fallback.BOUNDS[0]
    assert again.kept() < it.kept()


def test_of_a_batch_that_ends_before_its_first_proposal_nothing_is_kept() -> None:
    for steps in (0, 1):
        costs = known(full=1e-4, draft=1e-4)
        it, batch = steered(costs, steps)
        it.close(batch.prefix)
        assert not costs.plain and not costs.trust


def test_short_plain_texts_teach_what_passes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = known(full=1e-3, retrieval=2e-3, draft=1e-3)
    for _ in range(100):
        it, prefix, _ = listening(monkeypatch, costs)
        goes_on(it, prefix, 5)
        it.close(prefix)
    assert costs.seconds("full", 1, 1, 100) == pytest.approx(1e-4, rel=0.5)
