"""Verdict on mode `auto`: where it lost to plain decoding, and how near it comes to the best mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
AUTO, PLAIN = "auto", "ar"
LOST = 0.97
"""A cell is lost where the 95 % upper bound of the speedup lies below this; one turn gives no bound."""


def verdict(rows: Sequence[Row]) -> Row:
    """Return `lost` (names of cells), `mean` (of speedups), `of_best` (of tokens/s over the best fixed mode's).

    The best fixed setting is the fastest of the other modes in that cell, chosen with hindsight. Values are None where
    mode `auto` was not measured, or nothing else; `lost` is where no cell had more than one turn.
    """
    cells = {row["cell"]: {} for row in rows}  # type: dict[str, dict[str, Row]]
    for row in rows:
        cells[row["cell"]][row["mode"]] = row
    automatic = {name: modes for name, modes in cells.items() if AUTO in modes}
    bounds = {name: bound for name, modes in automatic.items() if (bound := modes[AUTO]["upper"]) is not None}
    shares = [share for modes in automatic.values() if (share := _of_best(modes)) is not None]
    return {
        "cells": len(cells),
        "lost": sorted(name for name, bound in bounds.items() if bound < LOST) if bounds else None,
        "mean": _mean([modes[AUTO]["speedup"] for modes in automatic.values()]),
        "of_best": _mean(shares),
    }


def best_fixed(modes: dict[str, Row]) -> Row | None:
    """Return the fastest row of a cell that is not mode `auto`'s."""
    fixed = [row for mode, row in modes.items() if mode != AUTO]
    return max(fixed, key=lambda row: float(row["tokens_per_second"]), default=None)


def _of_best(modes: dict[str, Row]) -> float | None:
    best = best_fixed(modes)
    return modes[AUTO]["tokens_per_second"] / best["tokens_per_second"] if best else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
