"""Protocol of the workers: a task comes on stdin, a result goes out as the last line of stdout.

Workers run by themselves, each in a process and perhaps with an interpreter of its own, so that neither threads nor
versions of one engine meet those of another. They import nothing of triforce.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

Task = dict[str, Any]
"""`model`, `draft`: folders; `ids`: the prompt; `tokens`: new ones; `threads`; `variant`; `work`: to convert in."""


class Clock:
    """Told of new tokens as they come. What comes first ends the prefill, and is no part of decoding."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.ticks: list[tuple[float, float, int]] = []

    def tick(self, tokens: int) -> None:
        """Record that so many new tokens are there."""
        self.ticks.append((perf_counter(), process_time(), tokens))

    def result(self, ids: list[int]) -> dict[str, Any]:
        """Seconds of prefill and of decoding, the tokens of the latter, and the cores that were busy meanwhile."""
        (start, cpu, first), (end, cpu_end, last) = self.ticks[0], self.ticks[-1]
        return {
            "prefill_seconds": start - self.began,
            "seconds": end - start,
            "decoded": last - first,
            "busy_cores": (cpu_end - cpu) / (end - start) if end > start else 0.0,
            "ids": ids,
        }


def work(run: Callable[[Task], dict[str, Any]]) -> None:
    """Do the task on stdin."""
    task = json.load(sys.stdin)
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)  # what an engine prints goes to stderr
    result = run(task)
    with os.fdopen(out, "w") as stdout:
        stdout.write(json.dumps(result) + "\n")
