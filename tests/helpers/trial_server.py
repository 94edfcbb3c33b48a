"""Trials as `sandbox.tried` makes them, in forks of a small process with the necessary imports.

A fork of a process that has imported torch takes longer than most trials of tokenizers.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from dataclasses import astuple
from importlib import import_module
from itertools import count
from typing import Any

from tests.helpers.forked_trial import said_in_fork
from triforce.sandbox import TrialLimits, answer_in


class TrialServer:
    """The process, which lives as long as this one. Forks of this process use it one after another."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", __name__, module]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._numbers = count()
        atexit.register(self._end)

    def _end(self) -> None:
        with self._process:
            self._process.kill()

    def tried(self, function: str, task: Any, limits: TrialLimits) -> Any:
        """Return what a function returns in a fork within limits. Raises TrialError."""
        assert self._process.stdin and self._process.stdout
        request = [next(self._numbers), str(task), function]
        self._process.stdin.write(json.dumps([request, task, astuple(limits)]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # the first answer may be of an earlier case that took too long
            answered, answer = json.loads(line)
            if answered == request:
                return answer_in(answer, limits)
        raise AssertionError("the process that tries has ended")


def main() -> None:
    """Answer requests from stdin."""
    import_module(sys.argv[1])
    for line in sys.stdin:
        request, task, limits = json.loads(line)
        module, _, name = request[-1].partition(":")
        answer = said_in_fork(getattr(import_module(module), name), task, TrialLimits(*limits))
        print(json.dumps([request, answer]), flush=True)


if __name__ == "__main__":
    main()
