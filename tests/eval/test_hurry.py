"""A quick evaluation keeps to its minute: it is made for models of any speed, and the clock is the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.recall_model import Recaller, noise, subject
from triforce.eval import MEASUREMENTS, EvalContext, evaluate, plan, shorten, time_budget
from triforce.eval.context import Text
from triforce.eval.time_budget import MINUTE, PREDICTED, ReadingForecast, ReadingPace
from triforce.llm import LLM

SECONDS = {name: measurement.seconds for name, measurement in MEASUREMENTS.items()}
EVERYTHING = list(MEASUREMENTS)


class Clock:
    """Time goes on as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("time_budget.", ""):
            monkeypatch.setattr(f"triforce.eval.{module}perf_counter", lambda: self.now)


def long_text(llm: LLM, tokens: int = 20_000) -> EvalContext:
    return subject(llm, Recaller(llm), noise(tokens), plan(32_768, 32_768))


@pytest.mark.parametrize(
    ("rate", "longest", "all_measured"),
    [(1e6, 8192, True), (1e3, 4096, True), (300, 1024, True), (200, 512, True), (20, 256, False)],
)
def test_quick_eval_of_slower_model_measures_less(llm: LLM, rate: float, longest: int, all_measured: bool) -> None:
    text_subject = long_text(llm)
    fitted = time_budget.fit(
        text_subject, EVERYTHING, ReadingForecast(ReadingPace(1 / rate, 0, 2 / rate)), SECONDS, 0.0
    )
    assert text_subject.plan.deepest == longest and (not fitted.left_out) == all_measured
    assert fitted.total <= PREDICTED and fitted.predicted.keys() | fitted.left_out.keys() == set(EVERYTHING)
    assert fitted.rate == pytest.approx(rate)


def test_quick_eval_makes_at_least_one_measurement(llm: LLM) -> None:
    fitted = time_budget.fit(long_text(llm), ["needle"], ReadingForecast(ReadingPace(1, 0, 1)), SECONDS, 0.0)
    assert list(fitted.predicted) == ["needle"] and fitted.total > MINUTE


def test_quick_eval_counts_trace_once(llm: LLM) -> None:
    text_subject = long_text(llm)
    pace = ReadingPace(0.01, 0, 0.01)
    joint, single = (
        time_budget.fit(text_subject, names, ReadingForecast(pace), SECONDS, 0.0)
        for names in (["bits", "positions"], ["bits"])
    )
    assert joint.total == single.total > 0 == joint.predicted["positions"]
    alone_fit = time_budget.fit(text_subject, ["positions"], ReadingForecast(pace), SECONDS, 0.0)
    assert alone_fit.total == single.total


class Timed(Recaller):
    """Takes its time: so much for each token, and more for each one before it."""

    def __init__(self, llm: LLM, clock: Clock, token: float, deeper: float) -> None:
        super().__init__(llm, reach=2)
        self.clock = clock
        self.token = token
        self.deeper = deeper
        self.fed = 0

    def __call__(self, ids_BT: Any, counts_B: Any, view: Any, at_BJ: Any = None) -> Any:
        count = ids_BT.shape[1]
        start = int(view.lengths_B[0])
        self.clock.now += count * (self.token + self.deeper * (start + count / 2))
        self.fed += count
        seen_B = view.lengths_B
        seen_B += count
        return torch.zeros(1, 0 if at_BJ is not None else count, self.config.vocab_size)


@pytest.mark.parametrize(("token", "deeper"), [(1e-3, 0.0), (1e-3, 1e-6), (0.05, 0.0)])
def test_quick_eval_pace_follows_model(llm: LLM, monkeypatch: pytest.MonkeyPatch, token: float, deeper: float) -> None:
    timed_subject = subject(llm, Timed(llm, Clock(monkeypatch), token, deeper), noise(6000), plan(32_768, 32_768))
    pace = time_budget.measure_pace(timed_subject).target
    assert pace.token == pytest.approx(token, rel=0.3) and pace.deeper == pytest.approx(deeper, rel=0.1)
    assert pace.reading(1000) == pytest.approx(1000 * (token + deeper * 500), rel=0.2)


@pytest.mark.parametrize("token", [1e-4, 1e-3, 5e-3, 5e-2])
def test_quick_eval_forecasts_are_met(llm: LLM, monkeypatch: pytest.MonkeyPatch, token: float) -> None:
    """Forecasts of all measurements but `loops`, which an engine decodes, and `agreement`, which needs a draft."""
    clock = Clock(monkeypatch)
    timed_subject = subject(llm, Timed(llm, clock, token, token / 10_000), noise(20_000), plan(32_768, 32_768))
    timed_subject.texts += [Text(f"{n}", "code", torch.tensor(noise(9000))) for n in range(5)]
    began = clock.now
    fitted = shorten(timed_subject, [name for name in EVERYTHING if name not in ("loops", "agreement")])
    looked = clock.now
    results = evaluate(timed_subject, list(fitted.predicted), lambda name, result: None, fitted)
    assert any("skipped" not in result for result in results.values())
    assert clock.now - looked == pytest.approx(fitted.total, rel=0.35) and clock.now - began < MINUTE


def test_quick_eval_leaves_out_what_exceeds_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has become slower: the first measurement takes its time, and tells of the others."""
    clock = Clock(monkeypatch)
    time_limit = time_budget.TimeBudget(clock.now, 100, {"bits": 10, "gain": 10, "copy": 1, "needle": 5}, {})
    late_parts: dict[str, str] = {}
    for name, takes in (("bits", 40), ("gain", 40), ("copy", 4), ("needle", 5)):
        late_parts[name] = time_limit.skip_reason(name)
        clock.now += 0 if late_parts[name] else takes
    assert not late_parts["bits"] and not late_parts["copy"]
    assert late_parts["gain"] == "it would take 40 s, and 20 s of the minute are left" and late_parts["needle"]


def test_quick_eval_skips_and_reports_late_parts(llm: LLM) -> None:
    noise_subject = subject(llm, Recaller(llm), noise(600))
    time_limit = time_budget.TimeBudget(0.0, 100, {"bits": 1e-9, "copy": 1e9}, {})
    results = evaluate(noise_subject, ["bits", "copy"], lambda name, result: None, time_limit)
    assert "skipped" in results["copy"] and "skipped" not in results["bits"]
