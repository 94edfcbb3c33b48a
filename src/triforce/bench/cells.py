"""The cells that speed is measured in: a context, a batch, a temperature and a workload.

All of them would take half a day, so a few are picked that have every value, and every pair that is likely to matter:
a covering design, made greedily and always the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from triforce.errors import RequestError

CONTEXTS = tuple(512 << n for n in range(9))
TEMPERATURES = (0.0, 0.6, 1.0, 1.2)
BATCHES = (1, 4, 8)
WORKLOADS = ("books", "code", "needle", "copy", "summary", "many-shot")
ALONE = 1 << 17
"""Context from which on texts are read one at a time: eight would need the memory of eight."""

MOST = 48


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """A point of measurement; `context` in tokens, `batch` in rows."""

    context: int
    batch: int
    temperature: float
    workload: str

    def __str__(self) -> str:
        size = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{size}-b{self.batch}-t{self.temperature:g}-{self.workload}"


Axes = tuple[str, str]
REQUIRED: tuple[Axes, ...] = (("context", "batch"), ("temperature", "workload"))
WELCOME: tuple[Axes, ...] = (
    ("context", "temperature"), ("batch", "workload"), ("batch", "temperature"), ("context", "workload"),
)  # fmt: skip


def grid(
    contexts: Iterable[int] = CONTEXTS,
    batches: Iterable[int] = BATCHES,
    temperatures: Iterable[float] = TEMPERATURES,
    workloads: Iterable[str] = WORKLOADS,
) -> list[Cell]:
    """Every cell of these values, but for those of many texts of `ALONE` tokens."""
    cells = (Cell(*values) for values in product(contexts, batches, temperatures, workloads))
    return [cell for cell in cells if cell.batch == 1 or cell.context < ALONE]


def covering(cells: list[Cell], most: int = MOST) -> list[Cell]:
    """Return at most so many cells: every required pair that occurs in them, then as many others as fit.

    Raises ValueError where they are too few for the required ones.
    """
    required, welcome = (_pairs(cells, axes) for axes in (REQUIRED, WELCOME))
    picked: list[Cell] = []
    while (required or welcome) and len(picked) < most:
        best = max(cells, key=lambda cell: _worth(cell, required, welcome))
        picked.append(best)
        required -= _pairs([best], REQUIRED)
        welcome -= _pairs([best], WELCOME)
    if required:
        raise ValueError(f"{most} cells cannot cover {len(required)} more pairs")
    return sorted(picked)


def _pairs(cells: Iterable[Cell], axes: Iterable[Axes]) -> set[tuple[Any, ...]]:
    """Return the pairs of values that occur in cells, with the axes that they are of."""
    return {(a, b, getattr(cell, a), getattr(cell, b)) for cell in cells for a, b in axes}


def _worth(cell: Cell, required: set[tuple[Any, ...]], welcome: set[tuple[Any, ...]]) -> tuple[int, int, int]:
    """Return how many open pairs a cell covers; among equals the one that reads less is worth more."""
    return len(_pairs([cell], REQUIRED) & required), len(_pairs([cell], WELCOME) & welcome), -cell.context * cell.batch


def named(names: Iterable[str]) -> list[Cell]:
    """Cells by their names. Raises RequestError for one that there is not."""
    known = {str(cell): cell for cell in grid()}
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"cell {unknown[0]!r} is not known; cells are called as {covering(grid())[0]} is")
    return [known[name] for name in names]
