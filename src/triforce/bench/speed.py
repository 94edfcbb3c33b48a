"""Plain decoding against the other modes: the same prompts, the same seeds, one process, in turns.

Prefill is reported beside decoding, never in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from statistics import fmean, median
from time import perf_counter
from typing import Any

from triforce.bench.prompts import Prompts, Sources, prompts, together
from triforce.disk_cache.prompt_file import SavedCache
from triforce.errors import RequestError
from triforce.eval import Table
from triforce.eval.scoring import ONE_SIDED, student
from triforce.eval.tables import tokens
from triforce.interface.outputs import RequestOutput
from triforce.interface.repeated_grams import repeated
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

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


Row = dict[str, Any]
LEAST, USUAL = 3, 7
"""Turns at least, whatever the time, as fewer say nothing about their spread; and of a cell in which they are long."""

SHORT = 30.0
"""Seconds that a cell may fill with more turns than usual: what takes .1 s is mostly noise."""


@dataclass(frozen=True)
class SpeedConfig:
    """Measurement of a cell: modes, new tokens of each text, turns at most, seconds for all cells.

    Where `repeats` is None turns are `USUAL`, or as many as are over in `SHORT` seconds. Each begins with `prepare`.
    """

    modes: Sequence[str]
    top_p: float = 0.9
    tokens: int = 128
    repeats: int | None = None
    seconds: float = 90 * 60.0
    prepare: Callable[[], None] = lambda: None


def rows(
    llm: LLM, sources: Sources, cells: Sequence[Cell], plan: SpeedConfig, kept: Prompts, keep: bool
) -> Iterator[list[Row]]:
    """The rows of each cell, one for each mode; each document is read once for all its cells, and then dropped.

    With `keep` the saved prompts stay. Raises TriforceError.
    """
    ends = perf_counter() + plan.seconds
    left = len(cells)
    warm = False
    most = max(*BATCHES, *(cell.batch for cell in cells))
    of_document = sorted(cells, key=lambda cell: (cell.context, cell.workload, cell.batch, cell.temperature))
    for (context, workload), some in itertools.groupby(of_document, key=lambda cell: (cell.context, cell.workload)):
        group = list(some)
        length = min(context, llm.target.config.context - plan.tokens)
        texts = prompts(sources, workload, length, most)  # the same ones, whatever is left to measure
        earlier, prefill = kept.of(f"{workload}-{context}", texts[0])
        if not warm:  # what is done once in a process is no part of any cell
            warm = bool(_in_turns(llm, texts[:1], group[0], replace(plan, tokens=8, repeats=1), earlier, 0.0))
        for cell in group:
            seconds = (ends - perf_counter()) / left
            yield cell_rows(llm, texts[: cell.batch], cell, plan, earlier, prefill, perf_counter() + seconds)
            left -= 1
        if not keep:
            kept.drop(f"{workload}-{context}")


def cell_rows(
    llm: LLM, texts: list[list[int]], cell: Cell, plan: SpeedConfig, earlier: SavedCache, prefill: float, ends: float
) -> list[Row]:
    """The rows of one cell, whose prompts are `texts`; from `ends` on, by `perf_counter`, there is no further turn."""
    runs = _in_turns(llm, texts, cell, plan, earlier, ends)
    return [_row(llm, cell, texts, runs, mode, prefill) for mode in plan.modes]


def _in_turns(
    llm: LLM, texts: list[list[int]], cell: Cell, plan: SpeedConfig, earlier: SavedCache, ends: float
) -> dict[str, list[RequestOutput]]:
    """The modes take turns, there and back, so that a drift of the machine meets all of them.

    The texts of a turn are those of its seed.
    """
    runs: dict[str, list[RequestOutput]] = {mode: [] for mode in dict.fromkeys([PLAIN, *plan.modes])}
    for turn in _turns(plan.repeats, ends):
        plan.prepare()
        params = SamplingParams(
            temperature=cell.temperature,
            top_p=plan.top_p,
            seed=1 + 1000 * turn,
            max_tokens=plan.tokens,
            ignore_eos=True,
        )
        for mode in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            runs[mode].append(together(llm, texts, params, PLAIN if mode == CONTROL else mode, earlier))
    return runs


def _turns(repeats: int | None, ends: float) -> Iterator[int]:
    """Yield numbers of turns until there are enough. When that is depends on the clock, never on what was measured."""
    most, short = (USUAL, perf_counter() + SHORT) if repeats is None else (repeats, 0.0)
    for turn in itertools.count():
        now = perf_counter()
        if (turn >= most and now > short) or (turn >= LEAST and now > ends):
            return
        yield turn


def _row(
    llm: LLM, cell: Cell, texts: list[list[int]], runs: dict[str, list[RequestOutput]], mode: str, prefill: float
) -> Row:
    mine = runs[mode]
    plain = runs[PLAIN]
    made, theirs = ([[output.token_ids for output in run.outputs] for run in some] for some in (mine, plain))
    return {
        "cell": str(cell),
        "mode": mode,
        "context": cell.context,
        "prompt_tokens": len(texts[0]),
        "batch": cell.batch,
        "temperature": cell.temperature,
        "workload": cell.workload,
        "coupling": llm.coupling,  # under `rejection` texts differ from plain decoding's, their law does not
        **timing(
            [run.decode_seconds for run in mine], [run.decode_seconds for run in plain], mine[0].completion_tokens
        ),
        "prefill_tokens_per_second": prefill,
        **acceptance(mine),
        "repeated_8_grams": sum(map(repeated, made[0])) / len(made[0]),
        "same_text_as_ar": made == theirs,
    }


def timing(seconds: Sequence[float], plain: Sequence[float], tokens: int) -> Row:
    """Medians; the speedups are taken turn by turn, and `spread` is the range of their middle half.

    `upper` is the 95 % upper bound of the mean speedup (Student's, one-sided, of its logarithm); of one turn there is
    none.
    """
    speedups = sorted(a / b for a, b in zip(plain, seconds, strict=True))
    quarter = len(speedups) // 4
    return {
        "tokens": tokens,
        "seconds": median(seconds),
        "tokens_per_second": tokens / median(seconds),
        "speedup": median(speedups),
        "spread": speedups[-1 - quarter] - speedups[quarter],
        "upper": upper(speedups),
        "turns": len(speedups),
    }


def upper(ratios: Sequence[float]) -> float | None:
    """Below this the geometric mean lies with 95 % confidence; of a single ratio nothing is known."""
    logs = [log(ratio) for ratio in ratios]
    count = len(ratios)
    mean = sum(logs) / count
    if count == 1:
        return None
    deviation = (sum((x - mean) ** 2 for x in logs) / (count - 1)) ** 0.5
    return exp(mean + student(count - 1, ONE_SIDED) * deviation / count**0.5)


def acceptance(runs: Sequence[RequestOutput]) -> Row:
    """Return shares of guesses kept over all turns, and passes of the full tier for one turn's texts."""
    kept: dict[str, list[int]] = {}
    for tier in (tier for run in runs for tier in run.tiers[:-1]):
        counts = kept.setdefault(tier.name, [0, 0])
        counts[:] = counts[0] + tier.accepted, counts[1] + tier.proposed
    shares = {name: accepted / proposed if proposed else None for name, (accepted, proposed) in kept.items()}
    return {"acceptance": shares, "full_passes": median(run.tiers[-1].passes for run in runs)}
