"""Measurements of the model abilities that this engine needs, made with the engine's own parts.

A measurement is three functions of one file, and one line in `MEASUREMENTS`: `measure` turns a subject into a JSON
object, `tables` turns that object into tables, and `seconds` predicts the time of `measure`. A measurement that does
not apply returns {"skipped": reason}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from triforce.eval import (
    agreement,
    bits_per_byte,
    context_gain,
    copying,
    needles,
    positions,
    repetition,
    rounded_inputs,
)
from triforce.eval.context import EvalConfig, EvalContext, Text, encode_texts, eval_config, tokenize
from triforce.eval.time_budget import ReadingForecast, TimeBudget, fit_config, measure_pace
from triforce.tables import Table

__all__ = [
    "MEASUREMENTS", "EvalConfig", "EvalContext", "Text", "encode_texts", "eval_config", "evaluate", "shorten",
    "tables", "tokenize",
]  # fmt: skip

Result = dict[str, Any]


class Measurement(NamedTuple):
    """Functions of one measurement: the measurement itself, its tables, and its predicted seconds."""

    measure: Callable[[EvalContext], Result]
    tables: Callable[[Result], list[Table]]
    seconds: Callable[[EvalContext, ReadingForecast], float]


MEASUREMENTS = {
    "bits": Measurement(bits_per_byte.measure, bits_per_byte.tables, bits_per_byte.seconds),
    "positions": Measurement(positions.measure, positions.tables, positions.seconds),
    "far": Measurement(positions.measure_far, positions.far_tables, positions.far_seconds),
    "gain": Measurement(context_gain.measure, context_gain.tables, context_gain.seconds),
    "needle": Measurement(needles.measure, needles.tables, needles.seconds),
    "copy": Measurement(copying.measure, copying.tables, copying.seconds),
    "agreement": Measurement(agreement.measure, agreement.tables, agreement.seconds),
    "inputs": Measurement(rounded_inputs.measure, rounded_inputs.tables, rounded_inputs.seconds),
    "loops": Measurement(repetition.measure, repetition.tables, repetition.seconds),
}


def shorten(subject: EvalContext, names: Sequence[str]) -> TimeBudget:
    """Measure the speed of a subject's models; give it a config with which the evaluation ends within a minute."""
    start = perf_counter()
    costs = {name: measurement.seconds for name, measurement in MEASUREMENTS.items()}
    return fit_config(subject, names, measure_pace(subject), costs, start)


def evaluate(
    subject: EvalContext, names: Sequence[str], report: Callable[[str, Result], None], budget: TimeBudget | None = None
) -> dict[str, Result]:
    """Return results by name, in the order of `MEASUREMENTS`. report: called with each result when it is ready.

    budget: skips measurements that no longer fit, judged by the time that earlier ones took.
    """
    results: dict[str, Result] = {}
    for name in (name for name in MEASUREMENTS if name in names):
        subject.label = name
        start = perf_counter()
        skip_reason = budget.skip_reason(name) if budget else ""
        results[name] = {"skipped": skip_reason} if skip_reason else MEASUREMENTS[name].measure(subject)
        results[name]["seconds"] = perf_counter() - start
        report(name, results[name])
    return results


def tables(name: str, result: Result) -> list[Table]:
    """Return the tables of a result; none if it was skipped."""
    return [] if "skipped" in result else MEASUREMENTS[name].tables(result)
