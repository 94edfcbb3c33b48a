"""The table of regret: python -m tests.helpers.planning [WORD OF A WORLD'S NAME]. All traces, some minutes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import mean

from tests.helpers.planning.regret import LENGTHS, Cell, cells
from tests.helpers.planning.traces import traces
from tests.helpers.planning.worlds import worlds


def summary(found: Sequence[Cell]) -> str:
    """One line of a table for each length: the least part of plain decoding, the mean part of the best fixed plan."""
    parts = []
    for length in LENGTHS:
        some = [cell for cell in found if cell.length == length]
        paying = [cell.best for cell in some if cell.pays]
        least, worst = min(cell.plain for cell in some), min(paying, default=1.0)
        parts.append(f"{least:5.2f} {mean(cell.best for cell in some):5.2f} {worst:5.2f}")
    return " | ".join(parts)


def main(word: str) -> None:
    """Print the table of each world, and of all together."""
    found: list[Cell] = []
    if not (chosen := [world for world in worlds() if word in world.name]):
        raise SystemExit(f"no world has {word!r} in its name; there are {', '.join(world.name for world in worlds())}")
    print(f"{'by length: least/plain, mean/best, worst/best where it pays 1.3x':70} {'64':17} | {'256':17} | 1024")
    for world in chosen:
        some = list(cells(world, traces().values()))
        found += some
        for name in dict.fromkeys(cell.trace for cell in some):
            own = [cell for cell in some if cell.trace == name]
            rates = " | ".join(f"{cell.plain:5.2f} {cell.best:5.2f}      " for cell in own)
            print(f"{world.name:25} {name:44} {rates}  {own[-1].plan}", flush=True)
        print(f"{world.name:70} {summary(some)}", flush=True)
    print(f"{'all':70} {summary(found)}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
