"""Loss by position: how much the tokens before help, and whether the model holds out as they become many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triforce.eval.context import KINDS, EvalContext, Text
from triforce.eval.forecast import ReadingForecast
from triforce.eval.tables import Table, tokens

FIRST = 256
"""The first bucket ends here, the others at its doubles."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """Mean nats by bucket of positions, over all windows of a kind."""
    return by_kind(subject, subject.windows())


def by_kind(subject: EvalContext, windows: list[Text]) -> dict[str, Any]:
    """Kind to buckets: first position, end, tokens, nats per token."""
    traces = [(window.kind, subject.trace(window)) for window in subject.steps(windows)]
    kinds = {kind: [trace for of, trace in traces if of == kind] for kind in KINDS}
    return {"kinds": {kind: buckets(found) for kind, found in kinds.items() if found}}


def buckets(traces: list[Tensor]) -> list[dict[str, Any]]:
    """Entry n of a trace is the loss of the token at position n + 1."""
    found, start, stop = [], 0, FIRST
    while parts := [trace[max(0, start - 1) : stop - 1] for trace in traces if len(trace) >= stop - 1]:
        nats_N = torch.cat(parts)
        found.append({"from": start, "to": stop, "tokens": len(nats_N), "nats": nats_N.double().mean().item()})
        start, stop = stop, 2 * stop
    return found


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    return forecast.traces(subject.windows())


def tables(result: dict[str, Any]) -> list[Table]:
    return [_table(result, "Loss by position")]


def _table(result: dict[str, Any], title: str) -> Table:
    kinds = result["kinds"]
    longest = max(kinds.values(), key=len)
    rows = []
    for n, bucket in enumerate(longest):
        of_kinds = [found[n] if n < len(found) else None for found in kinds.values()]
        cells = [f"{one['nats']:.3f} ({one['tokens']:,})" if one else "" for one in of_kinds]
        rows.append([f"{tokens(bucket['from'])} to {tokens(bucket['to'])}", *cells])
    note = "Nats per token, and of how many tokens; positions count from the start of a window."
    return Table(title, note, ["position", *kinds], rows)


def far_tables(result: dict[str, Any]) -> list[Table]:
    """Those of the longest readings."""
    return [_table(result, "Loss by position, longest readings")]
