"""Plain decoding against the other modes: the same prompts, the same seeds, one process, in turns.

Prefill is reported beside decoding, never in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from time import perf_counter
from typing import Any

from triforce.bench.batch_runner import Prompts, together
from triforce.bench.cells import BATCHES, Cell
from triforce.bench.prompts import Sources, prompts
from triforce.bench.speed_tables import CONTROL, PLAIN
from triforce.eval.statistics import ONE_SIDED, student
from triforce.interface.outputs import RequestOutput
from triforce.interface.repeated_grams import repeated
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.prompt_file import SavedCache
from triforce.llm import LLM

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
    ends, left, warm = perf_counter() + plan.seconds, len(cells), False
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
    mine, plain = runs[mode], runs[PLAIN]
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
    logs, count = [log(ratio) for ratio in ratios], len(ratios)
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
