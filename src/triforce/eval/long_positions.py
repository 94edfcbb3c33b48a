"""Loss by position beyond a span, to the end of the context: a few of each kind, as each takes minutes."""

from __future__ import annotations

from typing import Any

from triforce.eval import positions
from triforce.eval.context import EvalContext
from triforce.eval.forecast import ReadingForecast
from triforce.eval.tables import Table

READINGS = 2
"""Of each kind of text, if there are as many."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """As `positions`, up to `deepest`; nothing if a span is as deep."""
    plan = subject.plan
    if plan.deepest <= plan.span:
        return {"skipped": f"--max-context {plan.deepest:,} or the model's context ends where `positions` does"}
    return positions.by_kind(subject, subject.windows(plan.deepest, most=READINGS))


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    plan = subject.plan
    return forecast.traces(subject.windows(plan.deepest, most=READINGS)) if plan.deepest > plan.span else 0.0


def tables(result: dict[str, Any]) -> list[Table]:
    return positions.far_tables(result)
