"""How good a model is at what this engine needs of it, measured through the engine's own parts.

One measurement is one file, and one line in `MEASUREMENTS`: `measure` turns a subject into a JSON object, `tables`
turns that object into tables, `seconds` predicts what it will take. A measurement that does not apply gives
{"skipped": why}.
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
    long_positions,
    needles,
    positions,
    repetition,
)
from triforce.eval.config import EvalConfig, plan
from triforce.eval.context import EvalContext, Text, tokenize
from triforce.eval.forecast import ReadingForecast, look
from triforce.eval.hurry import Hurry, fit
from triforce.eval.tables import Table

__all__ = [
    "MEASUREMENTS",
    "EvalConfig",
    "EvalContext",
    "Hurry",
    "Table",
    "Text",
    "evaluate",
    "plan",
    "shorten",
    "tables",
    "tokenize"
]  # fmt: skip

Result = dict[str, Any]


class Measurement(NamedTuple):
    """What is measured, how it is shown, and how long it takes."""

    measure: Callable[[EvalContext], Result]
    tables: Callable[[Result], list[Table]]
    seconds: Callable[[EvalContext, ReadingForecast], float]


MEASUREMENTS = {
    "bits": Measurement(bits_per_byte.measure, bits_per_byte.tables, bits_per_byte.seconds),
    "positions": Measurement(positions.measure, positions.tables, positions.seconds),
    "far": Measurement(long_positions.measure, long_positions.tables, long_positions.seconds),
    "gain": Measurement(context_gain.measure, context_gain.tables, context_gain.seconds),
    "needle": Measurement(needles.measure, needles.tables, needles.seconds),
    "copy": Measurement(copying.measure, copying.tables, copying.seconds),
    "agreement": Measurement(agreement.measure, agreement.tables, agreement.seconds),
    "loops": Measurement(repetition.measure, repetition.tables, repetition.seconds),
}


def shorten(subject: EvalContext, names: Sequence[str]) -> Hurry:
    """Look how fast the models of a subject are, and give it a plan that ends in a minute from now."""
    began = perf_counter()
    return fit(subject, names, look(subject), {name: each.seconds for name, each in MEASUREMENTS.items()}, began)


def evaluate(
    subject: EvalContext, names: Sequence[str], tell: Callable[[str, Result], None], hurry: Hurry | None = None
) -> dict[str, Result]:
    """The results by name, in the order of the registry; `tell` hears of each as it is ready.

    hurry: leaves out what there is no time for, now that it is seen how long others took.
    """
    results: dict[str, Result] = {}
    for name in (name for name in MEASUREMENTS if name in names):
        subject.label, started = name, perf_counter()
        late = hurry.late(name) if hurry else ""
        results[name] = {"skipped": late} if late else MEASUREMENTS[name].measure(subject)
        results[name]["seconds"] = perf_counter() - started
        tell(name, results[name])
    return results


def tables(name: str, result: Result) -> list[Table]:
    """The tables of a result; none of one that was skipped."""
    return [] if "skipped" in result else MEASUREMENTS[name].tables(result)
