"""Time from a command to its first token, by step, measured over whole processes one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from statistics import median
from time import time
from typing import Any

from triforce.errors import RequestError

Row = dict[str, Any]
STEPS = ("imports", "weights", "engine", "prompt", "first token", "exit")
PROCESSES = ("first", "second")
"""The first process on this machine to run this model, with an empty cache folder, and the one after it."""


def rows(modes: Sequence[str], task: dict[str, Any], repeats: int) -> Iterator[Row]:
    """Yield rows of medians over `repeats` rounds, of `import torch` alone and of each mode's two processes.

    task: the worker's task without mode and start time. Processes of one round see the same other load of the machine.
    """
    torch_imports: list[float] = []
    starts: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(repeats):
        torch_imports.append(_run([sys.executable, "-c", "import torch"], dict(os.environ))[1])
        for mode in modes:
            with tempfile.TemporaryDirectory() as cache:
                for process in PROCESSES:
                    starts.setdefault((mode, process), []).append(_start(task | {"mode": mode}, cache))
    import_seconds = median(torch_imports)
    yield {
        "mode": "import torch",
        "process": "-",
        "seconds": import_seconds,
        "spread": _spread(torch_imports),
        "of_import": 1.0,
    }
    for (mode, process), step_seconds in starts.items():
        totals = [sum(steps.values()) for steps in step_seconds]
        yield {
            "mode": mode,
            "process": process,
            "seconds": median(totals),
            "spread": _spread(totals),
            "of_import": median(totals) / import_seconds,
            "steps": {step: median([steps[step] for steps in step_seconds]) for step in STEPS},
        }


def _start(task: dict[str, Any], cache: str) -> dict[str, float]:
    """Return seconds by step of one process with the cache folder `cache`. Raises RequestError if it fails."""
    start = time()
    command = [sys.executable, "-m", "triforce.bench.start_worker", json.dumps(task | {"began": start})]
    output, seconds = _run(command, os.environ | {"XDG_CACHE_HOME": cache})
    steps: dict[str, Any] = json.loads(output.splitlines()[-1])
    if "error" in steps:
        raise RequestError(steps["error"])
    return steps | {"exit": start + seconds - steps.pop("end")}


def _run(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
    """Return the output of a process and its seconds. Raises RequestError with its last line of errors if it fails."""
    start = time()
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        last_line = (process.stderr.strip() or f"code {process.returncode}").splitlines()[-1]
        raise RequestError(f"a process that was to be timed failed: {last_line}")
    return process.stdout, time() - start


def _spread(seconds: Sequence[float]) -> float:
    return max(seconds) - min(seconds)
