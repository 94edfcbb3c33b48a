"""Engines in processes and with interpreters of their own: what is asked, what is answered, and what fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from select import select
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import benchmarks
import triforce
from benchmarks.compare.workers.clock import SLACK, Result, Task, Turn

ANSWER = ("prefill_seconds", "seconds", "decoded", "busy_cores", "ids", "version")
BUSY = 0.85
"""Share of the cores that must have been busy, 1.7 of 2: else something was in the way, or idle."""

GRACE = 10.0
"""Seconds for a process to end by itself."""


class EngineTrouble(Exception):
    """An engine is not there, or it failed: `row` says `missing` and how to get it, or `failed` and its last words."""

    def __init__(self, **row: str) -> None:
        super().__init__(row)
        self.row: dict[str, Any] = row


@dataclass(frozen=True)
class Launcher:
    """Starts processes. `pythons`: interpreters by engine; `timeout`: seconds for an answer; `path`: see `packages`."""

    pythons: Mapping[str, str]
    threads: int
    timeout: float
    work: Path
    path: str

    @contextmanager
    def running(self, engine: str, needs: str | None, task: Task) -> Iterator[WorkerProcess]:
        """A process with a task, until it is left. Raises EngineTrouble where its interpreter cannot be run."""
        command = [*self.command(engine), "-m", "benchmarks.compare.workers.turns", engine]
        with TemporaryFile("w+", errors="replace") as errors:
            with _runnable(command):
                environment = self.environment(engine)
                process = Popen(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=errors, text=True)
            worker = WorkerProcess(process, errors, partial(trouble, engine, needs), self.timeout)
            try:
                worker.send(task | {"threads": self.threads, "work": str(self.work)})
                yield worker
            finally:
                worker.close()

    def command(self, engine: str) -> list[str]:
        return [self.pythons.get(engine, sys.executable)]

    def environment(self, engine: str) -> dict[str, str]:
        """Return variables of a process, which imports no `benchmarks` of the folder that the command starts in."""
        own_path = os.environ.get("PYTHONPATH") if self.command(engine) == [sys.executable] else None
        path = os.pathsep.join([self.path, own_path] if own_path else [self.path])
        return os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def require(self, engine: str, module: str, needs: str) -> None:
        """Raise EngineTrouble where an engine's interpreter does not find it."""
        command = [*self.command(engine), "-c", f"import {module}"]
        with _runnable(command):
            done = subprocess.run(command, env=self.environment(engine), capture_output=True, text=True, check=False)
        if done.returncode:
            raise trouble(engine, needs, done.stderr)


@contextmanager
def _runnable(command: Sequence[str]) -> Iterator[None]:
    """Raises EngineTrouble where the program of a command is none."""
    try:
        yield
    except OSError as error:
        raise EngineTrouble(failed=f"{command[0]} cannot be run ({error.strerror})") from error


@contextmanager
def packages() -> Iterator[str]:
    """A folder with `benchmarks`, `triforce` and nothing else: other interpreters must not find this one's packages."""
    with TemporaryDirectory() as folder:
        for package in (benchmarks, triforce):
            place = Path(str(package.__file__)).resolve().parent
            (Path(folder) / package.__name__).symlink_to(place, target_is_directory=True)
        yield folder


class WorkerProcess:
    """A worker that runs (see `workers`): a line is sent, and one comes back."""

    def __init__(
        self, process: Popen[str], errors: IO[str], explain: Callable[[str], EngineTrouble], timeout: float
    ) -> None:
        assert process.stdin and process.stdout
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._errors = errors
        self._explain = explain
        self._timeout = timeout
        self._over: EngineTrouble | None = None

    def send(self, line: Mapping[str, Any]) -> None:
        """Hand over a line. A process that has ended takes none; what it said is told where an answer is awaited."""
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(line) + "\n")
            self._stdin.flush()

    def ask(self, turn: Turn) -> Result:
        """Return what a turn came to. Raises EngineTrouble where the engine fails, ends or takes too long.

        In the first case it can be asked again; in the others it is over, and each answer is that again.
        """
        if self._over is None:
            self.send(turn)
            answer = self._answer()
            if "failed" in answer:
                raise EngineTrouble(failed=answer["failed"])
        if self._over:
            raise self._over
        return answer

    def _answer(self) -> Result:
        """Return an answer; an empty one where there is none, and never will be."""
        if not select([self._stdout], [], [], self._timeout)[0]:
            self._over = EngineTrouble(failed=f"no answer after {self._timeout:.0f} s")
            self._process.kill()
        elif not (line := self._stdout.readline()):
            self._over = self._explain(self._last_words())
        else:
            try:
                answer: Result = json.loads(line)
                return answer if "failed" in answer else {name: answer[name] for name in ANSWER} | answer
            except (ValueError, KeyError, TypeError):
                message = line[:100].strip()
                self._over = EngineTrouble(failed=f"its worker said {message!r}, which is no result")
        return {}

    def _last_words(self) -> str:
        code = self._end()
        self._errors.seek(0)
        killed = f"\nit was ended by signal {-code}" if code < 0 else ""
        return self._errors.read() + killed

    def close(self) -> None:
        """End the process."""
        for stream in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):
                stream.close()
        self._end()

    def _end(self) -> int:
        try:
            return self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def trouble(engine: str, needs: str | None, stderr: str) -> EngineTrouble:
    """Return what the last words of a process mean: that the engine must be installed, or that it failed."""
    last_line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    if needs and ("ModuleNotFoundError" in last_line or "ImportError" in last_line):
        how = f"pip install 'triforce[{needs}]' (here, or where --python {engine}=... points)"
        return EngineTrouble(missing=f"{how}; {last_line}")
    return EngineTrouble(failed=last_line[:300])


def turn_of(ids: list[int], tokens: int, settings: Mapping[str, Any], **options: Any) -> Turn:
    """A turn: greedy, its prompt to be read whatever was read before, unless `options` says otherwise."""
    return {
        "ids": ids,
        "tokens": tokens,
        "settings": dict(settings),
        "temperature": 0.0,
        "seed": 1,
        "fresh": True,
        **options,
    }


def task_of(model: Path, draft: str | Path | None, positions: int, settings: Mapping[str, Any]) -> Task:
    """Return a task for texts of at most `positions` tokens, prompt included."""
    return {
        "model": str(model), "draft": str(draft) if draft else None, "positions": positions + SLACK,
        "settings": dict(settings),
    }  # fmt: skip


def speeds(result: Result, context: int, threads: int) -> dict[str, Any]:
    """Return tokens/s of a text that `threads` threads made, and of its prompt."""
    decoded, seconds, prefill, busy = (result[name] for name in ("decoded", "seconds", "prefill_seconds", "busy_cores"))
    return {
        "tokens": decoded, "seconds": seconds, "tokens_per_second": decoded / seconds if seconds else 0.0,
        "prefill_seconds": prefill, "prefill_tokens_per_second": context / prefill,
        "busy_cores": busy, "accepted": busy >= BUSY * threads, "version": result["version"], "ids": result["ids"],
    }  # fmt: skip
