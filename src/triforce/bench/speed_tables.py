"""Rows of `triforce bench speed` as tables, and their verdict on mode `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from triforce.eval import Table
from triforce.eval.tables import tokens

Row = dict[str, Any]
AUTO, PLAIN, CONTROL = "auto", "ar", "ar again"
"""Modes; the last one is plain decoding once more, a control: it differs from itself by chance."""
LOST = 0.97
"""A cell is lost where the 95 % upper bound of the speedup lies below this; one turn gives no bound."""

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
    lines = []
    for name, found in _by_cell(rows).items():
        any_row = next(iter(found.values()))
        plain = (
            found[PLAIN]["tokens_per_second"] if PLAIN in found else any_row["tokens_per_second"] / any_row["speedup"]
        )
        prefill = any_row["prefill_tokens_per_second"]
        each = [speedup(found.get(mode)) for mode in modes]
        lines.append([name, f"{prefill:,.0f}" if prefill else "-", f"{plain:,.1f}", *each])
    note = (
        "Prefill and plain decoding in tokens/s (of all texts of a batch together), then the speedup of each mode with "
        "half its spread."
    )
    return Table("Every cell", note, ["cell", "prefill", "plain", *modes], lines)


def _by_cell(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return rows by the name of their cell, and by mode."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row["mode"]] = row
    return cells


def speedup(row: Row | None) -> str:
    """Return a speedup with half its spread, which one turn does not have; a dash where there is no speedup."""
    if row is None:
        return "-"
    return f"{row['speedup']:.2f}" + (f" ± {row['spread'] / 2:.2f}" if row["turns"] > 1 else "")


def verdict(rows: Sequence[Row], judged: str = AUTO) -> Row:
    """Return where a mode lost to plain decoding, and how near it comes to the best other one, over some `cells`.

    These are `lost` (names of cells), `mean` (of speedups), `of_best` (of tokens/s over the best fixed mode's).

    The best fixed setting is the fastest of the other modes in that cell, chosen with hindsight. Values are None where
    the mode was not measured, or nothing else; `lost` is where no cell had more than one turn.
    """
    cells = _by_cell(rows)
    some = {name: modes for name, modes in cells.items() if judged in modes}
    bounds = {name: bound for name, modes in some.items() if (bound := modes[judged]["upper"]) is not None}
    shares = [share for modes in some.values() if (share := _of_best(modes, judged)) is not None]
    return {
        "cells": len(cells),
        "lost": sorted(name for name, bound in bounds.items() if bound < LOST) if bounds else None,
        "mean": _mean([modes[judged]["speedup"] for modes in some.values()]),
        "of_best": _mean(shares),
    }


def _of_best(modes: dict[str, Row], judged: str) -> float | None:
    """Return tokens/s of a mode over those of the fastest row of its cell that is another one's."""
    rates = {mode: float(row["tokens_per_second"]) for mode, row in modes.items() if mode not in (AUTO, CONTROL)}
    rates.pop(judged, None)
    return float(modes[judged]["tokens_per_second"]) / max(rates.values()) if rates else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
