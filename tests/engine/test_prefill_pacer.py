"""The pacer grants as much of a prompt between two steps as the latency bound allows, at any speed of the model."""

from __future__ import annotations

import pytest

from triforce.distributed.group import ALONE
from triforce.engine import prefill_pacer
from triforce.engine.prefill_pacer import FIRST_PASS_TOKENS, MIN_PASS_TOKENS, PrefillPacer


class Machine:
    """A clock, and passes that take `fixed` seconds plus `seconds_per_token` for each token."""

    def __init__(self, fixed: float, seconds_per_token: float) -> None:
        self.now = 0.0
        self.fixed = fixed
        self.seconds_per_token = seconds_per_token
        self.step_seconds = 0.0

    def __call__(self) -> float:
        return self.now

    def read(self, pacer: PrefillPacer, tokens: int, tier: str = "full") -> int:
        """Run one pass over the tokens that the pacer grants; return their number."""
        granted = pacer.grant(tier, tokens)
        took = self.fixed + self.seconds_per_token * granted
        self.now += took
        pacer.record_pass(tier, granted, took)
        return granted

    def turn(self, pacer: PrefillPacer, tokens: int, step: float) -> tuple[list[int], float]:
        """Prefill between two steps of `step` seconds; return tokens by pass, and seconds between the steps' ends."""
        began = self.now
        granted = list[int]()
        pacer.begin(running=True, step_seconds=self.step_seconds)
        while sum(granted) < tokens:
            granted.append(self.read(pacer, tokens - sum(granted)))
            if not pacer.has_time():
                break
        self.now += step
        self.step_seconds = step
        return granted, self.now - began


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    simulated_machine = Machine(*request.param)
    monkeypatch.setattr(prefill_pacer, "perf_counter", simulated_machine)
    return simulated_machine


SPEEDS = [(0.0, 1e-5), (0.004, 2e-4), (0.01, 1e-3), (0.02, 2.5e-3)]


@pytest.mark.parametrize("machine", SPEEDS, indirect=True)
@pytest.mark.parametrize("step", [0.0, 0.03, 0.1])
def test_pacer_bound_holds_at_known_speed(machine: Machine, step: float) -> None:
    pacer = PrefillPacer(0.2, ALONE)
    machine.turn(pacer, FIRST_PASS_TOKENS, step)
    unread_tokens = 7000
    gaps = list[float]()
    while unread_tokens > 0:
        granted, gap = machine.turn(pacer, unread_tokens, step)
        unread_tokens -= sum(granted)
        gaps.append(gap)
    assert max(gaps) <= 0.2 + machine.fixed + MIN_PASS_TOKENS * machine.seconds_per_token + 1e-9
    if len(gaps) > 4:  # and the pacer uses the bound
        assert sorted(gaps)[len(gaps) // 2] >= 0.7 * 0.2


@pytest.mark.parametrize("machine", [(0.0, 0.1)], indirect=True)
def test_pacer_slow_model_still_progresses(machine: Machine) -> None:
    """A pass runs between two steps even if the smallest pass exceeds the bound."""
    pacer = PrefillPacer(0.2, ALONE)
    machine.turn(pacer, FIRST_PASS_TOKENS, 0.3)
    for _ in range(3):
        assert machine.turn(pacer, 1000, 0.3)[0] == [MIN_PASS_TOKENS]


@pytest.mark.parametrize("machine", [(0.01, 1e-3)], indirect=True)
def test_pacer_reads_all_without_running_texts(machine: Machine) -> None:
    pacer = PrefillPacer(0.2, ALONE)
    pacer.begin(running=False)
    assert machine.read(pacer, 512) == 512
    assert not pacer.has_time(), "the others have come in the meantime"


@pytest.mark.parametrize("machine", [(0.01, 1e-3)], indirect=True)
def test_pacer_tiers_have_own_speeds(machine: Machine) -> None:
    pacer = PrefillPacer(0.2, ALONE)
    machine.turn(pacer, FIRST_PASS_TOKENS, 0.0)
    pacer.begin(running=True)
    assert machine.read(pacer, 5000, "draft") == FIRST_PASS_TOKENS
    pacer.begin(running=True)
    assert FIRST_PASS_TOKENS < machine.read(pacer, 5000, "full") < 200


@pytest.mark.parametrize("machine", [(0.01, 1e-3)], indirect=True)
def test_pacer_strict_ignores_clock(machine: Machine) -> None:
    pacer = PrefillPacer(0.2, ALONE, strict=True)
    machine.turn(pacer, FIRST_PASS_TOKENS, 0.1)
    pacer.begin(running=True)
    assert machine.read(pacer, 8192) == 8192
