"""How good a model is at what this engine needs of it, measured through the engine's own parts.

One measurement is one file, and one line in `MEASUREMENTS`: `measure` turns a subject into a JSON object, `tables`
turns that object into tables. A measurement that does not apply gives {"skipped": why}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from triforce.evaluate import agreement, bits, copies, far, gain, loops, needles, positions
from triforce.evaluate.plan import Plan, plan
from triforce.evaluate.report import Table
from triforce.evaluate.subject import Subject, Text, tokenize

__all__ = ["MEASUREMENTS", "Plan", "Subject", "Table", "Text", "evaluate", "plan", "tables", "tokenize"]

Result = dict[str, Any]


class Measurement(NamedTuple):
    """What is measured, and how it is shown."""

    measure: Callable[[Subject], Result]
    tables: Callable[[Result], list[Table]]


MEASUREMENTS = {
    "bits": Measurement(bits.measure, bits.tables),
    "positions": Measurement(positions.measure, positions.tables),
    "far": Measurement(far.measure, far.tables),
    "gain": Measurement(gain.measure, gain.tables),
    "needle": Measurement(needles.measure, needles.tables),
    "copy": Measurement(copies.measure, copies.tables),
    "agreement": Measurement(agreement.measure, agreement.tables),
    "loops": Measurement(loops.measure, loops.tables),
}


def evaluate(subject: Subject, names: Sequence[str], tell: Callable[[str, Result], None]) -> dict[str, Result]:
    """The results by name, in the order of the registry; `tell` hears of each as it is ready."""
    results = {}
    for name in (name for name in MEASUREMENTS if name in names):
        subject.label, started = name, perf_counter()
        results[name] = MEASUREMENTS[name].measure(subject)
        results[name]["seconds"] = perf_counter() - started
        tell(name, results[name])
    return results


def tables(name: str, result: Result) -> list[Table]:
    """The tables of a result; none of one that was skipped."""
    return [] if "skipped" in result else MEASUREMENTS[name].tables(result)
