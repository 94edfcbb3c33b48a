"""Bits per byte of each text. The unit makes models of different vocabularies comparable."""

from __future__ import annotations

from math import log
from typing import Any

from torch import Tensor

from triforce.eval.context import EvalContext, Text, group_by_kind
from triforce.eval.scoring import draft_view, nats
from triforce.eval.time_budget import ReadingForecast
from triforce.tables import Table


def measure(subject: EvalContext) -> dict[str, Any]:
    """Measure the target with the full view, and the draft with sinks and a window, on the same windows of text."""
    rows = [_row(subject, window) for window in subject.with_progress(subject.windows())]
    texts = {name: _total([row for row in rows if row["text"] == name]) for name in {row["text"]: 0 for row in rows}}
    kinds = group_by_kind([(row["kind"], row) for row in rows])
    return {"texts": texts, "kinds": {kind: _total(kind_rows) for kind, kind_rows in kinds.items()}}


def _row(subject: EvalContext, window: Text) -> dict[str, Any]:
    size = len(subject.tokenizer.decode(window.ids_N[1:].tolist()).encode())
    row = {"text": window.name, "kind": window.kind, "tokens": len(window.ids_N) - 1, "bytes": size}
    row["target"] = _bits(subject.trace(window))
    if subject.llm.draft:
        draft = subject.llm.draft.decoder
        row["draft"] = _bits(nats(draft, draft_view(draft), window.ids_N))
    return row


def _bits(nats_N: Tensor) -> float:
    return nats_N.double().sum().item() / log(2)


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    size, tokens = (sum(row[count_name] for row in rows) for count_name in ("bytes", "tokens"))
    models = [name for name in ("target", "draft") if name in rows[0]]
    return {"tokens": tokens, "bytes": size} | {name: sum(row[name] for row in rows) / size for name in models}


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    windows = subject.windows()
    return forecast.trace_seconds(windows) + sum(forecast.draft_seconds(len(window.ids_N)) for window in windows)


def tables(result: dict[str, Any]) -> list[Table]:
    lines = {f"all {kind}": total for kind, total in result["kinds"].items()} | result["texts"]
    rows = [
        [name, f"{line['tokens']:,}", f"{line['bytes'] / line['tokens']:.2f}"]
        + [f"{line[model]:.3f}" if model in line else "" for model in ("target", "draft")]
        for name, line in lines.items()
    ]
    note = "The target sees all earlier tokens of a window, the draft its sinks and recent tokens, as in the engine."
    return [Table("Bits per byte", note, ["text", "tokens", "bytes/token", "target", "draft"], rows)]
