"""Rows of `triforce bench speed` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from triforce.bench.summary import PLAIN
from triforce.eval import Table
from triforce.eval.tables import tokens

Row = dict[str, Any]


AXES = ("context", "batch", "temperature", "workload")


def label(axis: str, value: Any) -> str:
    """Return a value of an axis as text."""
    return tokens(value) if axis == "context" else str(value)


def means(rows: Sequence[Row], mode: str, axis: str) -> dict[Any, float]:
    """Return the mean speedup of a mode by the values of an axis."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        if row["mode"] == mode:
            found.setdefault(row[axis], []).append(row["speedup"])
    order = list(found) if axis == "workload" else sorted(found)
    return {value: fmean(found[value]) for value in order}


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Return tables of mean speedups along each axis, and of every cell beside plain decoding."""
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if mode != PLAIN]
    return [*(_along(rows, modes, axis) for axis in AXES), _cells(rows, modes)]


def _along(rows: Sequence[Row], modes: Sequence[str], axis: str) -> Table:
    found = {mode: means(rows, mode, axis) for mode in modes}
    lines = []
    for value in next(iter(found.values()), {}):
        cells = {row["cell"] for row in rows if row[axis] == value}
        each = [f"{mean[value]:.2f}" if value in mean else "-" for mean in found.values()]
        lines.append([label(axis, value), str(len(cells)), *each])
    return Table(f"Speedup by {axis}", "Means over the cells.", [axis, "cells", *modes], lines)


def _cells(rows: Sequence[Row], modes: Sequence[str]) -> Table:
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row["mode"]] = row
    lines = []
    for name, found in cells.items():
        any_row = next(iter(found.values()))
        plain = (
            found[PLAIN]["tokens_per_second"] if PLAIN in found else any_row["tokens_per_second"] / any_row["speedup"]
        )
        prefill = any_row["prefill_tokens_per_second"]
        each = [_speedup(found.get(mode)) for mode in modes]
        lines.append([str(name), f"{prefill:,.0f}" if prefill else "-", f"{plain:,.1f}", *each])
    note = (
        "Prefill and plain decoding in tokens/s (of all texts of a batch together), then the speedup of each mode with "
        "half its spread."
    )
    return Table("Every cell", note, ["cell", "prefill", "plain", *modes], lines)


def _speedup(row: Row | None) -> str:
    return "-" if row is None else f"{row['speedup']:.2f} ± {row['spread'] / 2:.2f}"
