"""Loss by position: the gain from preceding tokens, and the model's stability as their number grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triforce.eval.context import EvalContext, Text, group_by_kind
from triforce.eval.time_budget import ReadingForecast
from triforce.tables import Table, tokens

FIRST_STOP = 256
"""End of the first bucket. The others end at its doubles."""

MAX_FAR_WINDOWS = 2
"""Number of the longest windows that are read for each kind of text, at most. Each takes minutes."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return mean nats by bucket of positions, over all windows of a kind."""
    return _kind_buckets(subject, subject.windows())


def measure_far(subject: EvalContext) -> dict[str, Any]:
    """Return mean nats by bucket in the longest windows; skipped if these have no more tokens than a span."""
    config = subject.config
    if config.longest_window <= config.span:
        return {
            "skipped": f"the longest windows have {config.longest_window:,} tokens, and `positions` reads them already"
        }
    return _kind_buckets(subject, subject.windows(config.longest_window, max_windows=MAX_FAR_WINDOWS))


def _kind_buckets(subject: EvalContext, windows: list[Text]) -> dict[str, Any]:
    """Return buckets by kind of text, each with its first position, end, tokens, and nats per token."""
    traces = [(window.kind, subject.trace(window)) for window in subject.with_progress(windows)]
    return {"kinds": {kind: buckets(kind_traces) for kind, kind_traces in group_by_kind(traces).items()}}


def buckets(traces: list[Tensor]) -> list[dict[str, Any]]:
    """Return buckets of traces. Entry n of a trace is the loss of the token at position n + 1, in nats."""
    bucket_rows = []
    start = 0
    stop = FIRST_STOP
    while parts := [trace[max(0, start - 1) : stop - 1] for trace in traces if len(trace) >= stop - 1]:
        nats_N = torch.cat(parts)
        bucket_rows.append({"from": start, "to": stop, "tokens": len(nats_N), "nats": nats_N.double().mean().item()})
        start = stop
        stop = 2 * stop
    return bucket_rows


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    return forecast.trace_seconds(subject.windows())


def far_seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    config = subject.config
    return (
        forecast.trace_seconds(subject.windows(config.longest_window, max_windows=MAX_FAR_WINDOWS))
        if config.longest_window > config.span
        else 0.0
    )


def tables(result: dict[str, Any]) -> list[Table]:
    return [_table(result, "Loss by position")]


def far_tables(result: dict[str, Any]) -> list[Table]:
    return [_table(result, "Loss by position, longest readings")]


def _table(result: dict[str, Any], title: str) -> Table:
    kinds = result["kinds"]
    longest = max(kinds.values(), key=len)
    rows = []
    for n, bucket in enumerate(longest):
        bucket_row = [kind_buckets[n] if n < len(kind_buckets) else None for kind_buckets in kinds.values()]
        cells = [
            f"{kind_bucket['nats']:.3f} ({kind_bucket['tokens']:,})" if kind_bucket else ""
            for kind_bucket in bucket_row
        ]
        rows.append([f"{tokens(bucket['from'])} to {tokens(bucket['to'])}", *cells])
    note = "Nats per token, with the number of tokens in brackets; positions count from the start of a window."
    return Table(title, note, ["position", *kinds], rows)
