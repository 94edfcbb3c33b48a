"""Tasks and turns of workers, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time
from typing import Any

Task = dict[str, Any]
"""`model`, `draft`: folders, or a GGUF file; `work`: to convert in; `threads`; `positions`: of the longest turn, prompt
and all; `settings`: of the engine."""

Turn = dict[str, Any]
"""`ids`: the prompt; `tokens`: new ones; `temperature`; `seed`; `fresh`: whether the prompt must be read again, though
it may have been; `settings`: of this turn."""

Result = dict[str, Any]
Generate = Callable[[Turn], Result]

SLACK = 16
"""Positions beyond prompt and text, for draft tokens."""


class Clock:
    """Told of new tokens as they come. What comes first ends the prefill, and is no part of decoding."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.cpu_began = process_time()
        self.ticks: list[tuple[float, float, int]] = []

    def tick(self, tokens: int) -> None:
        """Record the time at which `tokens` new tokens are there."""
        self.ticks.append((perf_counter(), process_time(), tokens))

    def result(self, ids: list[int], version: str) -> Result:
        """Return seconds of prefill, of decoding and of a pass in it, busy cores, and the tokens of decoding."""
        (start, cpu, first_tick), (end, cpu_end, last_tick) = self.ticks[0], self.ticks[-1]
        return {
            "prefill_seconds": start - self.began,
            "prefill_busy_cores": (cpu - self.cpu_began) / (start - self.began),
            "seconds": end - start,
            "pass_seconds": median([b[0] - a[0] for a, b in pairwise(self.ticks)] or [0.0]),
            "decoded": last_tick - first_tick,
            "busy_cores": (cpu_end - cpu) / (end - start) if end > start else 0.0,
            "ids": ids,
            "version": version,
        }


def common_tokens(read: Sequence[int], turn: Turn) -> int:
    """Return the tokens of the prompt that the last read prompt covers. The last token is always read again."""
    ids: list[int] = turn["ids"]
    if turn["fresh"]:
        return 0
    common = next((n for n, (a, b) in enumerate(zip(read, ids, strict=False)) if a != b), min(len(read), len(ids)))
    return min(common, len(ids) - 1)
