"""Sandbox: untrusted input is tried in a separate process with limits on time and memory. The process may crash.

An input may overflow a stack, keep a parser busy for hours, take all memory, or end the process that reads it. A
thread is no remedy, as it cannot be stopped. The separate process runs this module as a program. The program imports
nothing of triforce but the module of the function that it calls, so it starts fast.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

LARGEST_ANSWER = 1 << 20
"""Characters of the longest accepted answer, as JSON."""
LARGEST_REASON = 1 << 17
"""Characters of a reason that are passed on."""
NICENESS = 5
"""Niceness of trials: generation has priority over them."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits of a trial, on top of the time and memory of its imports."""

    cpu_seconds: int = 2
    memory_bytes: int = 2 << 30
    stack_bytes: int = 2 << 20
    """A quarter of a thread's usual stack, so that an input that passes a trial fits the stack of a thread."""
    wall_seconds: float = 60.0
    """Limit of elapsed time. It exceeds `cpu_seconds`, as a process on a busy machine waits for CPU time."""


class TrialError(Exception):
    """A trial's function raised. The text is its reason and may have many lines."""


class TrialLimitError(TrialError):
    """A trial exceeded a limit, or ended its process."""


def working_folder() -> str | None:
    """Return a child's working folder: None for the current one; the root if the current folder was deleted.

    Imports fail in a deleted folder.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.sep
    return None


class Trial:
    """One trial. It starts on construction."""

    def __init__(self, function: str, task: Any, limits: TrialLimits = TrialLimits()) -> None:
        """Call a function with `task` in a separate process. Task and answer travel as JSON.

        function: `module:name`. The limits count from the end of its module's import. `result` returns the function's
        value. An exception's text becomes the reason of TrialError.
        """
        self._limits = limits
        self._task = json.dumps(task)
        command = [sys.executable, "-P", __file__, function, json.dumps(astuple(limits))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=working_folder()
        )

    def stop(self) -> None:
        """End the process. A waiting `result` raises TrialLimitError. May be called from another thread."""
        self._process.kill()

    def result(self) -> Any:
        """Wait for the end and return the function's value. Raises TrialError."""
        with self._process:
            try:
                output, _ = self._process.communicate(self._task, self._limits.wall_seconds)
            except subprocess.TimeoutExpired:
                output = ""
            except BaseException:
                self.stop()
                raise
            self.stop()
        return parse_answer(output, self._limits)


def parse_answer(output: str, limits: TrialLimits) -> Any:
    """Return the answer in the output of `attempt`. Raises TrialError."""
    try:
        passed, answer = json.loads(output)
    except ValueError:
        raise TrialLimitError(
            f"it takes more than {limits.cpu_seconds} s or {limits.memory_bytes >> 20} MiB, or ends the process that "
            "reads it"
        ) from None
    if not passed:
        raise TrialError(answer)
    return answer


def run_trial(function: str, task: Any, limits: TrialLimits = TrialLimits()) -> Any:
    """Return a function's value from a separate process (see `Trial`). Raises TrialError."""
    return Trial(function, task, limits).result()


def limit(limits: TrialLimits) -> None:
    """Set limits of this process, on top of its use so far. Limits that the system lacks are skipped."""
    memory = limits.memory_bytes
    with suppress(OSError):
        memory += int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    seconds = round(time.process_time()) + limits.cpu_seconds
    for kind, maximum in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_STACK, limits.stack_bytes),
                       (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):  # fmt: skip
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (maximum, maximum))
    os.nice(NICENESS)


def attempt(function: Callable[[Any], Any], task: Any, limits: TrialLimits) -> str:
    """Call a function within limits of this process. Return JSON: whether it passed, and its answer or reason."""
    limit(limits)
    try:
        output = json.dumps([True, function(task)])
        if len(output) > LARGEST_ANSWER:
            raise ValueError("its answer is too long")
    except MemoryError:  # the text of an error may need memory that is not there
        return ""
    except BaseException as error:  # libraries of other languages raise types outside Exception
        output = json.dumps([False, str(error)[:LARGEST_REASON] or type(error).__name__])
    return output


def main() -> None:
    """Call the function in argv with the task from stdin. Print the result of `attempt`."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # libraries may print
    module, _, name = sys.argv[1].partition(":")
    sys.path.append(str(Path(__file__).parents[1]))
    function = getattr(import_module(module), name)
    answers.write(attempt(function, json.load(sys.stdin), TrialLimits(*json.loads(sys.argv[2]))))
    answers.flush()
    os._exit(0)  # freeing a large input takes time


if __name__ == "__main__":
    main()


class ChildProcess:
    """One run of a command, from bytes to bytes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._ended = False
        self._process: Popen[bytes] | None = None

    def run(self, data: bytes, seconds: float) -> bytes | None:
        """Return the command's output for `data`; None if it fails, is ended, or takes more than `seconds`."""
        with Popen(self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as self._process:
            if self._ended:
                self._process.kill()
            try:
                output, _ = self._process.communicate(data, seconds)
            except TimeoutExpired:
                self._process.kill()
                return None
            except BaseException:
                self._process.kill()
                raise
        return output if self._process.returncode == 0 else None

    def end(self) -> None:
        """Make `run` return at once. May be called from another thread."""
        self._ended = True
        if self._process:
            self._process.kill()
