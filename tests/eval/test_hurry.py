"""A quick evaluation keeps to its minute: it is made for models of any speed, and the clock is the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.recall_model import Recaller, noise, subject
from triforce.eval import MEASUREMENTS, EvalContext, eval_config, evaluate, shorten, time_budget
from triforce.eval.context import Text
from triforce.eval.time_budget import MINUTE, PREDICTION_SECONDS, ReadingForecast, ReadingPace
from triforce.llm import LLM

SECONDS = {name: each.seconds for name, each in MEASUREMENTS.items()}
EVERYTHING = list(MEASUREMENTS)


class Clock:
    """Time goes on as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("time_budget.", ""):
            monkeypatch.setattr(f"triforce.eval.{module}perf_counter", lambda: self.now)


def long_text(llm: LLM, tokens: int = 20_000) -> EvalContext:
    return subject(llm, Recaller(llm), noise(tokens), eval_config(32_768, 32_768))


@pytest.mark.parametrize(
    ("rate", "longest", "whole"),
    [(1e6, 8192, True), (1e3, 4096, True), (300, 1024, True), (200, 512, True), (20, 256, False)],
)
def test_quick_eval_of_slower_model_measures_less(llm: LLM, rate: float, longest: int, whole: bool) -> None:
    given = long_text(llm)
    found = time_budget.fit_config(given, EVERYTHING, ReadingForecast(ReadingPace(1 / rate, 0, 2 / rate)), SECONDS, 0.0)
    assert given.config.longest_window == longest and (not found.left_out) == whole
    assert found.total <= PREDICTION_SECONDS and found.predicted.keys() | found.left_out.keys() == set(EVERYTHING)
    assert found.rate == pytest.approx(rate)


def test_quick_eval_makes_at_least_one_measurement(llm: LLM) -> None:
    found = time_budget.fit_config(long_text(llm), ["needle"], ReadingForecast(ReadingPace(1, 0, 1)), SECONDS, 0.0)
    assert list(found.predicted) == ["needle"] and found.total > MINUTE


def test_quick_eval_counts_trace_once(llm: LLM) -> None:
    given, pace = long_text(llm), ReadingPace(0.01, 0, 0.01)
    both, one = (
        time_budget.fit_config(given, names, ReadingForecast(pace), SECONDS, 0.0)
        for names in (["bits", "positions"], ["bits"])
    )
    assert both.total == one.total > 0 == both.predicted["positions"]
    alone = time_budget.fit_config(given, ["positions"], ReadingForecast(pace), SECONDS, 0.0)
    assert alone.total == one.total


class Timed(Recaller):
    """Takes its time: so much for each token, and more for each one before it."""

    def __init__(self, llm: LLM, clock: Clock, token: float, deeper: float) -> None:
        super().__init__(llm, reach=2)
        self.clock, self.token, self.deeper, self.fed = clock, token, deeper, 0

    def __call__(self, ids_BT: Any, counts_B: Any, view: Any, at_BJ: Any = None) -> Any:
        count, start = ids_BT.shape[1], int(view.lengths_B[0])
        self.clock.now += count * (self.token + self.deeper * (start + count / 2))
        self.fed += count
        seen_B = view.lengths_B
        seen_B += count
        return torch.zeros(1, 0 if at_BJ is not None else count, self.config.vocab_size)


@pytest.mark.parametrize(("token", "deeper"), [(1e-3, 0.0), (1e-3, 1e-6), (0.05, 0.0)])
def test_quick_eval_pace_follows_model(llm: LLM, monkeypatch: pytest.MonkeyPatch, token: float, deeper: float) -> None:
    given = subject(llm, Timed(llm, Clock(monkeypatch), token, deeper), noise(6000), eval_config(32_768, 32_768))
    pace = time_budget.measure_pace(given).target
    assert pace.token_seconds == pytest.approx(token, rel=0.3) and pace.past_token_seconds == pytest.approx(
        deeper, rel=0.1
    )
    assert pace.reading_seconds(1000) == pytest.approx(1000 * (token + deeper * 500), rel=0.2)


@pytest.mark.parametrize("token", [1e-4, 1e-3, 5e-3, 5e-2])
def test_quick_eval_forecasts_are_met(llm: LLM, monkeypatch: pytest.MonkeyPatch, token: float) -> None:
    """Of everything but `loops`, which is decoded by an engine, and `agreement`, for which there is no draft."""
    clock = Clock(monkeypatch)
    given = subject(llm, Timed(llm, clock, token, token / 10_000), noise(20_000), eval_config(32_768, 32_768))
    given.texts += [Text(f"{n}", "code", torch.tensor(noise(9000))) for n in range(5)]
    began = clock.now
    found = shorten(given, [name for name in EVERYTHING if name not in ("loops", "agreement")])
    looked = clock.now
    results = evaluate(given, list(found.predicted), lambda name, result: None, found)
    assert any("skipped" not in result for result in results.values())
    assert clock.now - looked == pytest.approx(found.total, rel=0.35) and clock.now - began < MINUTE


def test_quick_eval_leaves_out_what_exceeds_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has become slower: the first measurement takes its time, and tells of the others."""
    clock = Clock(monkeypatch)
    found = time_budget.TimeBudget(clock.now, 100, {"bits": 10, "gain": 10, "copy": 1, "needle": 5}, {})
    late: dict[str, str] = {}
    for name, takes in (("bits", 40), ("gain", 40), ("copy", 4), ("needle", 5)):
        late[name] = found.skip_reason(name)
        clock.now += 0 if late[name] else takes
    assert not late["bits"] and not late["copy"]
    assert late["gain"] == "it would take 40 s, and 20 s of the minute are left" and late["needle"]


def test_quick_eval_skips_and_reports_late_parts(llm: LLM) -> None:
    given = subject(llm, Recaller(llm), noise(600))
    found = time_budget.TimeBudget(0.0, 100, {"bits": 1e-9, "copy": 1e9}, {})
    results = evaluate(given, ["bits", "copy"], lambda name, result: None, found)
    assert "skipped" in results["copy"] and "skipped" not in results["bits"]
