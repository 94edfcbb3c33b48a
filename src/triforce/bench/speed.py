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

from triforce.bench.prompts import PromptCache, Sources, generate_batch, prompts
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


def mean_speedups(rows: Sequence[Row], mode: str, axis: str) -> dict[Any, float]:
    """Return the mean speedup of a mode by the values of an axis."""
    speedups_by_value: dict[Any, list[float]] = {}
    for row in rows:
        if row["mode"] == mode:
            speedups_by_value.setdefault(row[axis], []).append(row["speedup"])
    order = list(speedups_by_value) if axis == "workload" else sorted(speedups_by_value)
    return {value: fmean(speedups_by_value[value]) for value in order}


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Return tables of mean speedups along each axis, and of every cell beside plain decoding."""
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if mode != PLAIN]
    return [*(_axis_table(rows, modes, axis) for axis in AXES), _cell_table(rows, modes)]


def _axis_table(rows: Sequence[Row], modes: Sequence[str], axis: str) -> Table:
    means_by_mode = {mode: mean_speedups(rows, mode, axis) for mode in modes}
    lines = []
    for value in next(iter(means_by_mode.values()), {}):
        cells = {row["cell"] for row in rows if row[axis] == value}
        speedup_cells = [f"{mean[value]:.2f}" if value in mean else "-" for mean in means_by_mode.values()]
        lines.append([label(axis, value), str(len(cells)), *speedup_cells])
    return Table(f"Speedup by {axis}", "Means over the cells.", [axis, "cells", *modes], lines)


def _cell_table(rows: Sequence[Row], modes: Sequence[str]) -> Table:
    lines = []
    for name, rows_by_mode in _by_cell(rows).items():
        any_row = next(iter(rows_by_mode.values()))
        plain = (
            rows_by_mode[PLAIN]["tokens_per_second"]
            if PLAIN in rows_by_mode
            else any_row["tokens_per_second"] / any_row["speedup"]
        )
        prefill = any_row["prefill_tokens_per_second"]
        speedup_cells = [speedup(rows_by_mode.get(mode)) for mode in modes]
        lines.append([name, f"{prefill:,.0f}" if prefill else "-", f"{plain:,.1f}", *speedup_cells])
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
    judged_cells = {name: modes for name, modes in cells.items() if judged in modes}
    bounds = {name: bound for name, modes in judged_cells.items() if (bound := modes[judged]["upper"]) is not None}
    shares = [share for modes in judged_cells.values() if (share := _of_best(modes, judged)) is not None]
    return {
        "cells": len(cells),
        "lost": sorted(name for name, bound in bounds.items() if bound < LOST) if bounds else None,
        "mean": _mean([modes[judged]["speedup"] for modes in judged_cells.values()]),
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

MAX_CELLS = 48


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
OPTIONAL: tuple[Axes, ...] = (
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


def covering(cells: list[Cell], max_cells: int = MAX_CELLS) -> list[Cell]:
    """Return at most so many cells: every required pair that occurs in them, then as many others as fit.

    Raises ValueError where they are too few for the required ones.
    """
    required, optional = (_pairs(cells, axes) for axes in (REQUIRED, OPTIONAL))
    picked: list[Cell] = []
    while (required or optional) and len(picked) < max_cells:
        best = max(cells, key=lambda cell: _coverage(cell, required, optional))
        picked.append(best)
        required -= _pairs([best], REQUIRED)
        optional -= _pairs([best], OPTIONAL)
    if required:
        raise ValueError(f"{max_cells} cells cannot cover {len(required)} more pairs")
    return sorted(picked)


def _pairs(cells: Iterable[Cell], axes: Iterable[Axes]) -> set[tuple[Any, ...]]:
    """Return the pairs of values that occur in cells, with the axes that they are of."""
    return {(a, b, getattr(cell, a), getattr(cell, b)) for cell in cells for a, b in axes}


def _coverage(cell: Cell, required: set[tuple[Any, ...]], optional: set[tuple[Any, ...]]) -> tuple[int, int, int]:
    """Return how many open pairs a cell covers; among equals the one that reads less is worth more."""
    return (
        len(_pairs([cell], REQUIRED) & required),
        len(_pairs([cell], OPTIONAL) & optional),
        -cell.context * cell.batch,
    )


def cells_named(names: Iterable[str]) -> list[Cell]:
    """Cells by their names. Raises RequestError for one that there is not."""
    cells_by_name = {str(cell): cell for cell in grid()}
    if unknown := [name for name in names if name not in cells_by_name]:
        raise RequestError(f"cell {unknown[0]!r} is not known; cells are called as {covering(grid())[0]} is")
    return [cells_by_name[name] for name in names]


Row = dict[str, Any]
LEAST_TURNS, USUAL_TURNS = 3, 7
"""Turns at least, whatever the time, as fewer say nothing about their spread; and of a cell in which they are long."""

SHORT_SECONDS = 30.0
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
    llm: LLM, sources: Sources, cells: Sequence[Cell], plan: SpeedConfig, prompt_cache: PromptCache, keep: bool
) -> Iterator[list[Row]]:
    """The rows of each cell, one for each mode; each document is read once for all its cells, and then dropped.

    With `keep` the saved prompts stay. Raises TriforceError.
    """
    deadline = perf_counter() + plan.seconds
    open_cells = len(cells)
    warmed_up = False
    max_batch = max(*BATCHES, *(cell.batch for cell in cells))
    cells_by_document = sorted(cells, key=lambda cell: (cell.context, cell.workload, cell.batch, cell.temperature))
    for (context, workload), document_cells in itertools.groupby(
        cells_by_document, key=lambda cell: (cell.context, cell.workload)
    ):
        group = list(document_cells)
        length = min(context, llm.target.config.context - plan.tokens)
        texts = prompts(sources, workload, length, max_batch)  # the same ones, whatever is left to measure
        saved_prompt, prefill = prompt_cache.load(f"{workload}-{context}", texts[0])
        if not warmed_up:  # what is done once in a process is no part of any cell
            warmed_up = bool(
                _interleaved_outputs(llm, texts[:1], group[0], replace(plan, tokens=8, repeats=1), saved_prompt, 0.0)
            )
        for cell in group:
            seconds = (deadline - perf_counter()) / open_cells
            yield cell_rows(llm, texts[: cell.batch], cell, plan, saved_prompt, prefill, perf_counter() + seconds)
            open_cells -= 1
        if not keep:
            prompt_cache.drop(f"{workload}-{context}")


def cell_rows(
    llm: LLM,
    texts: list[list[int]],
    cell: Cell,
    plan: SpeedConfig,
    saved_prompt: SavedCache,
    prefill: float,
    deadline: float,
) -> list[Row]:
    """Return the rows of one cell. No turn starts after `deadline`, by `perf_counter`. texts: prompts of the cell."""
    runs = _interleaved_outputs(llm, texts, cell, plan, saved_prompt, deadline)
    return [_row(llm, cell, texts, runs, mode, prefill) for mode in plan.modes]


def _interleaved_outputs(
    llm: LLM, texts: list[list[int]], cell: Cell, plan: SpeedConfig, saved_prompt: SavedCache, deadline: float
) -> dict[str, list[RequestOutput]]:
    """The modes take turns, there and back, so that a drift of the machine meets all of them.

    The texts of a turn are those of its seed.
    """
    runs: dict[str, list[RequestOutput]] = {mode: [] for mode in dict.fromkeys([PLAIN, *plan.modes])}
    for turn in _turns(plan.repeats, deadline):
        plan.prepare()
        params = SamplingParams(
            temperature=cell.temperature,
            top_p=plan.top_p,
            seed=1 + 1000 * turn,
            max_tokens=plan.tokens,
            ignore_eos=True,
        )
        for mode in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            runs[mode].append(generate_batch(llm, texts, params, PLAIN if mode == CONTROL else mode, saved_prompt))
    return runs


def _turns(repeats: int | None, deadline: float) -> Iterator[int]:
    """Yield numbers of turns until there are enough. When that is depends on the clock, never on what was measured."""
    turn_count, short_deadline = (USUAL_TURNS, perf_counter() + SHORT_SECONDS) if repeats is None else (repeats, 0.0)
    for turn in itertools.count():
        timestamp = perf_counter()
        if (turn >= turn_count and timestamp > short_deadline) or (turn >= LEAST_TURNS and timestamp > deadline):
            return
        yield turn


def _row(
    llm: LLM, cell: Cell, texts: list[list[int]], runs: dict[str, list[RequestOutput]], mode: str, prefill: float
) -> Row:
    outputs = runs[mode]
    plain_outputs = runs[PLAIN]
    mode_texts, plain_texts = (
        [[output.token_ids for output in run.outputs] for run in mode_runs] for mode_runs in (outputs, plain_outputs)
    )
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
            [run.decode_seconds for run in outputs],
            [run.decode_seconds for run in plain_outputs],
            outputs[0].completion_tokens,
        ),
        "prefill_tokens_per_second": prefill,
        **acceptance(outputs),
        "repeated_8_grams": sum(map(repeated, mode_texts[0])) / len(mode_texts[0]),
        "same_text_as_ar": mode_texts == plain_texts,
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
        "upper": speedup_bound(speedups),
        "turns": len(speedups),
    }


def speedup_bound(ratios: Sequence[float]) -> float | None:
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
    counts_by_tier: dict[str, list[int]] = {}
    for tier in (tier for run in runs for tier in run.tiers[:-1]):
        counts = counts_by_tier.setdefault(tier.name, [0, 0])
        counts[:] = counts[0] + tier.accepted, counts[1] + tier.proposed
    shares = {name: accepted / proposed if proposed else None for name, (accepted, proposed) in counts_by_tier.items()}
    return {"acceptance": shares, "full_passes": median(run.tiers[-1].passes for run in runs)}
