"""Rows of `speed` and `kernels` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from triforce.bench.verdict import PLAIN
from triforce.evaluate import Table
from triforce.evaluate.report import percent, tokens

Row = dict[str, Any]


def size(context: int) -> str:
    """512, 2K, 32K."""
    return tokens(context)


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Speedups of each cell by mode, and what plain decoding did there; and their means by each axis."""
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if mode != PLAIN]
    return [
        *(_means(rows, modes, axis) for axis in ("context", "batch", "temperature", "workload")),
        _cells(rows, modes),
    ]


def _means(rows: Sequence[Row], modes: Sequence[str], axis: str) -> Table:
    values = list(dict.fromkeys(row.get(axis) for row in rows))
    values = values if axis == "workload" else sorted(value for value in values if value is not None)
    lines = []
    for value in values:
        here = [row for row in rows if row.get(axis) == value]
        found = {mode: [row["speedup"] for row in here if row["mode"] == mode] for mode in modes}
        cells = len({row.get("cell") for row in here})
        name = size(value) if axis == "context" else str(value)
        lines.append([name, str(cells), *(f"{fmean(some):.2f}" if some else "-" for some in found.values())])
    return Table(f"Speedup by {axis}", "Means over the cells.", [axis, "cells", *modes], lines)


def _cells(rows: Sequence[Row], modes: Sequence[str]) -> Table:
    cells: dict[Any, dict[str, Row]] = {}
    for row in rows:
        key = row.get("cell") or f"{size(row['context'])}, T = {row['temperature']:g}"
        cells.setdefault(key, {})[row["mode"]] = row
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


def kernel_tables(rows: Sequence[Row]) -> list[Table]:
    """Of each kernel its time, its bytes a second, and what share of the memory's that is."""
    lines = []
    for row in rows:
        where = [f"{name} {row[name]:,}" for name in ("context", "width", "vocabulary", "temperature") if name in row]
        name = ", ".join([row["kernel"], *([row["shape"]] if "shape" in row else []), *where])
        took = f"{row['seconds'] * 1e6:,.0f}" if "seconds" in row else "-"
        speed = f"{row['gb_per_second']:.1f}" if "gb_per_second" in row else "-"
        lines.append([name, took, speed, percent(row.get("fraction")) or "-"])
    note = "Bytes are those that must be read: weights, and keys and values in sight."
    return [Table("Against the memory", note, ["kernel", "microseconds", "GB/s", "of the memory's"], lines)]
