"""The table of regret: python -m tests.helpers.planning [WORD OF A WORLD'S NAME] [--json FILE]. Some minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

from tests.helpers.planning.regret import LENGTHS, Cell, cells
from tests.helpers.planning.traces import traces
from tests.helpers.planning.worlds import worlds
from triforce.cli.bench.setup import about, write
from triforce.cli.options import json_file


def rows(all_cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return by length the least share of plain decoding's rate, and mean and least share of the best fixed plan's.

    The last one covers only texts in which speculation pays.
    """
    rows_by_length = []
    for length in LENGTHS:
        length_cells = [cell for cell in all_cells if cell.length == length]
        best = mean(cell.best for cell in length_cells)
        paying = [cell.best for cell in length_cells if cell.pays]
        row = {"tokens": length, "texts": len(length_cells), "least_of_plain": min(cell.plain for cell in length_cells)}
        rows_by_length.append(row | {"mean_of_best": best, "least_where_it_pays": min(paying, default=1.0)})
    return rows_by_length


def summary(all_cells: Sequence[Cell]) -> str:
    """Return the rows in one line."""
    names = "least_of_plain", "mean_of_best", "least_where_it_pays"
    return " | ".join(" ".join(f"{row[name]:5.2f}" for name in names) for row in rows(all_cells))


def main() -> None:
    """Print the table of each world, and the table over all."""
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.planning", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="worlds with this in their names (default: all)")
    json_file(parser)
    options = parser.parse_args()
    word = options.word
    all_cells = list[Cell]()
    if not (chosen := [world for world in worlds() if word in world.name]):
        raise SystemExit(f"no world has {word!r} in its name; there are {', '.join(world.name for world in worlds())}")
    print(f"{'by length: least/plain, mean/best, worst/best where it pays 1.3x':70} {'64':17} | {'256':17} | 1024")
    for world in chosen:
        world_cells = list(cells(world, traces().values()))
        all_cells += world_cells
        for name in dict.fromkeys(cell.trace for cell in world_cells):
            trace_cells = [cell for cell in world_cells if cell.trace == name]
            rates = " | ".join(f"{cell.plain:5.2f} {cell.best:5.2f}      " for cell in trace_cells)
            print(f"{world.name:25} {name:44} {rates}  {trace_cells[-1].plan}", flush=True)
        print(f"{world.name:70} {summary(world_cells)}", flush=True)
    print(f"{'all':70} {summary(all_cells)}")
    command = f"{parser.prog} {word}".rstrip()
    write(options.json, about(command) | {"worlds": [world.name for world in chosen], "rows": rows(all_cells)})


if __name__ == "__main__":
    main()
