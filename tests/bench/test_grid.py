"""The cells of `triforce bench speed`: that few of them cover what must be covered, checked one by one."""

from __future__ import annotations

from itertools import product

import pytest

from triforce.bench.speed import (
    BATCHES,
    CONTEXTS,
    MAX_CELLS,
    TEMPERATURES,
    UNBATCHED_CONTEXT,
    WORKLOADS,
    Cell,
    cells_named,
    covering,
    grid,
)
from triforce.errors import RequestError


def uncovered(cells: list[Cell]) -> list[object]:
    """Values and pairs that no cell has, found without the module's own idea of a pair."""
    missing: list[object] = []
    missing += [c for c in CONTEXTS if not any(cell.context == c for cell in cells)]
    missing += [b for b in BATCHES if not any(cell.batch == b for cell in cells)]
    missing += [t for t in TEMPERATURES if not any(cell.temperature == t for cell in cells)]
    missing += [w for w in WORKLOADS if not any(cell.workload == w for cell in cells)]
    for context, batch in product(CONTEXTS, BATCHES):
        if (batch == 1 or context < UNBATCHED_CONTEXT) and not any(
            (x.context, x.batch) == (context, batch) for x in cells
        ):
            missing.append((context, batch))
    for pair in product(TEMPERATURES, WORKLOADS):
        if not any((x.temperature, x.workload) == pair for x in cells):
            missing.append(pair)
    return missing


def test_grid_covers_values_and_pairs_in_48_cells() -> None:
    cells = covering(grid())
    assert len(cells) <= MAX_CELLS == 48 and len(set(cells)) == len(cells)
    assert not uncovered(cells)
    assert all(cell.batch == 1 for cell in cells if cell.context >= UNBATCHED_CONTEXT)
    assert cells == covering(grid())


def test_grid_check_detects_missing_value() -> None:
    """Negative controls: without any one context, batch, temperature, workload, or pair of them."""
    cells = covering(grid())
    for axis in ("context", "batch", "temperature", "workload"):
        for value in {getattr(cell, axis) for cell in cells}:
            assert value in uncovered([cell for cell in cells if getattr(cell, axis) != value])
    for pair in {(cell.temperature, cell.workload) for cell in cells}:
        assert pair in uncovered([cell for cell in cells if (cell.temperature, cell.workload) != pair])


def test_grid_required_pairs_come_first() -> None:
    """25 pairs of context and batch: fewer cells cannot cover them, and 25 do."""
    assert not uncovered(covering(grid(), 25))
    with pytest.raises(ValueError, match="24 cells cannot cover"):
        covering(grid(), 24)


def test_grid_whole_has_every_cell() -> None:
    assert len(grid()) == (8 * 3 + 1) * 4 * 6
    assert len(grid([512], [1], [0.0], ["books"])) == 1


def test_grid_cell_names_are_unique() -> None:
    cells = grid()
    assert len({str(cell) for cell in cells}) == len(cells)
    assert str(Cell(131_072, 1, 0.6, "needle")) == "128k-b1-t0.6-needle" and str(cells[0]) == "512-b1-t0-books"
    assert cells_named([str(cell) for cell in cells]) == cells
    with pytest.raises(RequestError, match="128k-b8-t0-books"):
        cells_named(["128k-b8-t0-books"])
