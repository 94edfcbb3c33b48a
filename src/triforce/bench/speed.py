"""Plain decoding against the other modes: the same prompts and seeds, in one process, in alternating turns.

Prefill is reported separately from decoding.
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
from triforce.eval.scoring import ONE_SIDED, student
from triforce.interface.outputs import RequestOutput
from triforce.interface.repeated_grams import repeated_share
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.tables import Table, tokens

AUTO, PLAIN, CONTROL = "auto", "ar", "ar again"
"""Modes. `CONTROL` is plain decoding once more: it differs from plain decoding by chance only."""
LOST_SPEEDUP = 0.97
"""Speedup below which a cell is lost, by the 95 % upper bound of its speedup. One turn gives no bound."""

AXES = ("context", "batch", "temperature", "workload")


def label(axis: str, value: Any) -> str:
    """Return a value of an axis as text."""
    return tokens(value) if axis == "context" else str(value)


def mean_speedups(rows: Sequence[Row], mode: str, axis: str) -> dict[Any, float]:
    """Return the mean speedup of a mode by value of an axis."""
    speedups_by_value: dict[Any, list[float]] = {}
    for row in rows:
        if row["mode"] == mode:
            speedups_by_value.setdefault(row[axis], []).append(row["speedup"])
    order = list(speedups_by_value) if axis == "workload" else sorted(speedups_by_value)
    return {value: fmean(speedups_by_value[value]) for value in order}


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Return tables of mean speedups along each axis, and of all cells with the rate of plain decoding."""
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
        plain_rate = (
            rows_by_mode[PLAIN]["tokens_per_second"]
            if PLAIN in rows_by_mode
            else any_row["tokens_per_second"] / any_row["speedup"]
        )
        prefill = any_row["prefill_tokens_per_second"]
        speedup_cells = [speedup(rows_by_mode.get(mode)) for mode in modes]
        lines.append([name, f"{prefill:,.0f}" if prefill else "-", f"{plain_rate:,.1f}", *speedup_cells])
    note = (
        "Prefill and plain decoding in tokens/s (of all texts of a batch together), then the speedup of each mode with "
        "half its spread."
    )
    return Table("Every cell", note, ["cell", "prefill", "plain", *modes], lines)


def _by_cell(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Return rows by name of their cell, then by mode."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row["mode"]] = row
    return cells


def speedup(row: Row | None) -> str:
    """Return a speedup as text with half its spread, which a single turn lacks; a dash without a row."""
    if row is None:
        return "-"
    return f"{row['speedup']:.2f}" + (f" ± {row['spread'] / 2:.2f}" if row["turns"] > 1 else "")


def verdict(rows: Sequence[Row], judged_mode: str = AUTO) -> Row:
    """Return the cells where a mode lost to plain decoding, and how close it comes to the best other mode.

    The keys are `cells` (number of all cells), `lost` (names of cells), `mean` (of speedups), and `of_best` (mean of
    tokens/s over the best fixed mode's).

    The best fixed mode is the fastest of the other modes in a cell, chosen with hindsight. Values are None if the mode
    was not measured, or no other mode was. `lost` is None if no cell had more than one turn.
    """
    cells = _by_cell(rows)
    judged_cells = {name: modes for name, modes in cells.items() if judged_mode in modes}
    bounds = {name: bound for name, modes in judged_cells.items() if (bound := modes[judged_mode]["upper"]) is not None}
    shares = [share for modes in judged_cells.values() if (share := _of_best(modes, judged_mode)) is not None]
    return {
        "cells": len(cells),
        "lost": sorted(name for name, bound in bounds.items() if bound < LOST_SPEEDUP) if bounds else None,
        "mean": _mean([modes[judged_mode]["speedup"] for modes in judged_cells.values()]),
        "of_best": _mean(shares),
    }


def _of_best(modes: dict[str, Row], judged_mode: str) -> float | None:
    """Return tokens/s of a mode over those of the fastest other fixed mode of its cell; None without one."""
    rates = {mode: float(row["tokens_per_second"]) for mode, row in modes.items() if mode not in (AUTO, CONTROL)}
    rates.pop(judged_mode, None)
    return float(modes[judged_mode]["tokens_per_second"]) / max(rates.values()) if rates else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


CONTEXTS = tuple(512 << n for n in range(9))
TEMPERATURES = (0.0, 0.6, 1.0, 1.2)
BATCHES = (1, 4, 8)
WORKLOADS = ("books", "code", "needle", "copy", "summary", "many-shot")
UNBATCHED_CONTEXT = 1 << 17
"""Context from which on cells have batch 1 only, because a batch of eight needs eight times the memory."""

MAX_CELLS = 48


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """A point of measurement. context: tokens. batch: rows."""

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
    """Return all cells of these values, except batches of contexts of `UNBATCHED_CONTEXT` tokens or more."""
    cells = (Cell(*values) for values in product(contexts, batches, temperatures, workloads))
    return [cell for cell in cells if cell.batch == 1 or cell.context < UNBATCHED_CONTEXT]


def covering(cells: list[Cell], max_cells: int = MAX_CELLS) -> list[Cell]:
    """Return at most `max_cells` cells that cover every required pair of values, then as many optional ones as fit.

    Only pairs that occur in `cells` count. Raises ValueError if `max_cells` cannot cover the required pairs.
    """
    required, optional = (_pairs(cells, axes) for axes in (REQUIRED, OPTIONAL))
    picked: list[Cell] = []
    while (required or optional) and len(picked) < max_cells:
        best_cell = max(cells, key=lambda cell: _coverage(cell, required, optional))
        picked.append(best_cell)
        required -= _pairs([best_cell], REQUIRED)
        optional -= _pairs([best_cell], OPTIONAL)
    if required:
        raise ValueError(f"{max_cells} cells cannot cover {len(required)} more pairs")
    return sorted(picked)


def _pairs(cells: Iterable[Cell], axes: Iterable[Axes]) -> set[tuple[Any, ...]]:
    """Return the pairs of values that occur in cells, each with its pair of axes."""
    return {(a, b, getattr(cell, a), getattr(cell, b)) for cell in cells for a, b in axes}


def _coverage(cell: Cell, required: set[tuple[Any, ...]], optional: set[tuple[Any, ...]]) -> tuple[int, int, int]:
    """Return a sort key: the open required and optional pairs that a cell covers, then fewer tokens to read."""
    return (
        len(_pairs([cell], REQUIRED) & required),
        len(_pairs([cell], OPTIONAL) & optional),
        -cell.context * cell.batch,
    )


def cells_named(names: Iterable[str]) -> list[Cell]:
    """Return cells by name. Raises RequestError for an unknown name."""
    cells_by_name = {str(cell): cell for cell in grid()}
    if unknown := [name for name in names if name not in cells_by_name]:
        raise RequestError(f"cell {unknown[0]!r} is not known; names of cells have the form of {covering(grid())[0]}")
    return [cells_by_name[name] for name in names]


Row = dict[str, Any]
LEAST_TURNS, USUAL_TURNS = 3, 7
"""Least turns of a cell, however long they take, because fewer show no spread; and turns of a cell with long turns."""

SHORT_SECONDS = 30.0
"""Seconds that a cell with short turns may fill with more than the usual turns: turns of .1 s are mostly noise."""


@dataclass(frozen=True)
class SpeedConfig:
    """Settings of the measurement of cells.

    tokens: new tokens of each text. repeats: greatest number of turns; None: `USUAL_TURNS`, or more until
    `SHORT_SECONDS` have passed. seconds: time for all cells. prepare: called before each turn.
    """

    modes: Sequence[str]
    top_p: float = 0.9
    tokens: int = 128
    repeats: int | None = None
    seconds: float = 90 * 60.0
    prepare: Callable[[], None] = lambda: None


def rows(
    llm: LLM,
    sources: Sources,
    cells: Sequence[Cell],
    config: SpeedConfig,
    prompt_cache: PromptCache,
    keep_prompts: bool,
) -> Iterator[list[Row]]:
    """Yield the rows of each cell, one for each mode. A document is prefilled once for all its cells, then dropped.

    keep_prompts: saved prompts are not deleted. Raises TriforceError.
    """
    deadline = perf_counter() + config.seconds
    open_cell_count = len(cells)
    warmed_up = False
    max_batch = max(*BATCHES, *(cell.batch for cell in cells))
    cells_by_document = sorted(cells, key=lambda cell: (cell.context, cell.workload, cell.batch, cell.temperature))
    for (context, workload), document_cells in itertools.groupby(
        cells_by_document, key=lambda cell: (cell.context, cell.workload)
    ):
        cells_of_document = list(document_cells)
        length = min(context, llm.target.config.context - config.tokens)
        texts = prompts(sources, workload, length, max_batch)  # the same prompts for any number of cells left
        saved_prompt, prefill = prompt_cache.load(f"{workload}-{context}", texts[0])
        if not warmed_up:  # work done once in a process is not part of any cell
            warmed_up = bool(
                _interleaved_outputs(
                    llm, texts[:1], cells_of_document[0], replace(config, tokens=8, repeats=1), saved_prompt, 0.0
                )
            )
        for cell in cells_of_document:
            seconds = (deadline - perf_counter()) / open_cell_count
            yield cell_rows(llm, texts[: cell.batch], cell, config, saved_prompt, prefill, perf_counter() + seconds)
            open_cell_count -= 1
        if not keep_prompts:
            prompt_cache.drop(f"{workload}-{context}")


def cell_rows(
    llm: LLM,
    texts: list[list[int]],
    cell: Cell,
    config: SpeedConfig,
    saved_prompt: SavedCache,
    prefill: float,
    deadline: float,
) -> list[Row]:
    """Return the rows of one cell. No turn starts after `deadline`, by `perf_counter`. texts: prompts of the cell."""
    runs = _interleaved_outputs(llm, texts, cell, config, saved_prompt, deadline)
    return [_row(llm, cell, texts, runs, mode, prefill) for mode in config.modes]


def _interleaved_outputs(
    llm: LLM, texts: list[list[int]], cell: Cell, config: SpeedConfig, saved_prompt: SavedCache, deadline: float
) -> dict[str, list[RequestOutput]]:
    """Return the outputs of each mode. Modes alternate forwards and backwards, so that a drift affects all of them.

    A turn has its own seed, which determines its texts.
    """
    runs: dict[str, list[RequestOutput]] = {mode: [] for mode in dict.fromkeys([PLAIN, *config.modes])}
    for turn in _turns(config.repeats, deadline):
        config.prepare()
        params = SamplingParams(
            temperature=cell.temperature,
            top_p=config.top_p,
            seed=1 + 1000 * turn,
            max_tokens=config.tokens,
            ignore_eos=True,
        )
        for mode in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            runs[mode].append(generate_batch(llm, texts, params, PLAIN if mode == CONTROL else mode, saved_prompt))
    return runs


def _turns(repeats: int | None, deadline: float) -> Iterator[int]:
    """Yield numbers of turns until there are enough. The end depends on the clock, never on the measured values."""
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
        "coupling": llm.coupling,  # under `rejection` texts differ from plain decoding's, their distribution does not
        **timing(
            [run.decode_seconds for run in outputs],
            [run.decode_seconds for run in plain_outputs],
            outputs[0].completion_tokens,
        ),
        "prefill_tokens_per_second": prefill,
        **acceptance(outputs),
        "repeated_8_grams": sum(map(repeated_share, mode_texts[0])) / len(mode_texts[0]),
        "same_text_as_ar": mode_texts == plain_texts,
    }


def timing(seconds: Sequence[float], plain_seconds: Sequence[float], tokens: int) -> Row:
    """Return medians over turns. Speedups are ratios within a turn; `spread` is the range of their middle half.

    `upper` is the 95 % upper bound of the mean speedup (Student's, one-sided, of its logarithm); None for one turn.
    """
    speedups = sorted(a / b for a, b in zip(plain_seconds, seconds, strict=True))
    quarter_count = len(speedups) // 4
    return {
        "tokens": tokens,
        "seconds": median(seconds),
        "tokens_per_second": tokens / median(seconds),
        "speedup": median(speedups),
        "spread": speedups[-1 - quarter_count] - speedups[quarter_count],
        "upper": speedup_bound(speedups),
        "turns": len(speedups),
    }


def speedup_bound(ratios: Sequence[float]) -> float | None:
    """Return the 95 % upper bound of the geometric mean of ratios; None for a single ratio."""
    logs = [log(ratio) for ratio in ratios]
    count = len(ratios)
    mean = sum(logs) / count
    if count == 1:
        return None
    deviation = (sum((x - mean) ** 2 for x in logs) / (count - 1)) ** 0.5
    return exp(mean + student(count - 1, ONE_SIDED) * deviation / count**0.5)


def acceptance(runs: Sequence[RequestOutput]) -> Row:
    """Return the shares of accepted draft tokens by tier over all turns, and the median of a turn's full passes."""
    counts_by_tier: dict[str, list[int]] = {}
    for tier in (tier for run in runs for tier in run.tiers[:-1]):
        counts = counts_by_tier.setdefault(tier.name, [0, 0])
        counts[:] = counts[0] + tier.accepted, counts[1] + tier.proposed
    shares = {name: accepted / proposed if proposed else None for name, (accepted, proposed) in counts_by_tier.items()}
    return {"acceptance": shares, "full_passes": median(run.tiers[-1].passes for run in runs)}
