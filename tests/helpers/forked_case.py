"""Fuzz cases in a forked process, one by one, with limits on time and memory.

The process is a copy of its parent, so that no case pays for an interpreter or for the parent's imports.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import NoReturn

import pytest
import torch

from tests.helpers.case_outcome import BROKEN, Limits, Outcome, fault
from triforce.backends import dispatch

MOST_SAID = 1 << 16
"""Bytes at the end of each stream that are read."""

Opener = Callable[[Path], int]
"""Opens the case in a folder as users do; returns an exit code, 0 or 2. Its own assertions may fail."""


class CaseProcess:
    """A fork of this process that opens cases, until one of them has a fault."""

    def __init__(self, open_case: Opener, limits: Limits) -> None:
        self._limits = limits
        pipes = [os.pipe() for _ in range(4)]
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of parents with threads
            self._child = os.fork()
        (tasks, self._tasks), *answers = pipes
        if not self._child:
            for end in (self._tasks, *(reading for reading, _ in answers)):
                os.close(end)
            _serve(open_case, limits, tasks, [writing for _, writing in answers])
        for end in (tasks, *(writing for _, writing in answers)):
            os.close(end)
        self._reading = [reading for reading, _ in answers]
        for end in self._reading:
            os.set_blocking(end, False)
        self.opened = 0
        self.ended = False

    def open(self, seed: int, folder: Path) -> Outcome:
        """Open a case. A fault ends this process and kills all that it leaves running."""
        began = monotonic()
        self.opened += 1
        os.write(self._tasks, f"{folder}\n".encode())
        (answer, out, err), in_time = self._listen(began + self._limits.seconds)
        if answer.endswith("\n"):
            code, used, process_is_left = json.loads(answer)
            wrong = "it has left a process" if process_is_left else fault(code, out, err, used, self._limits)
        else:
            code = self.end()
            used = 0
            wrong = f"it ended with {code}" if in_time else f"it was not done after {self._limits.seconds:g} s"
        if wrong:
            self.end()
        return Outcome(seed, code, wrong, err[-4000:], round(monotonic() - began, 3), used)

    def _listen(self, deadline: float) -> tuple[list[str], bool]:
        """Return the texts of the pipes until there is an answer, and whether that came before the deadline."""
        received = {end: b"" for end in self._reading}
        answers = self._reading[0]
        closed = False
        with selectors.DefaultSelector() as selector:
            for end in self._reading:
                selector.register(end, selectors.EVENT_READ)
            while (
                not (closed or received[answers].endswith(b"\n")) and (remaining_seconds := deadline - monotonic()) > 0
            ):
                for end in [key.fd for key, _ in selector.select(remaining_seconds)]:
                    piece = os.read(end, MOST_SAID)
                    received[end] = (received[end] + piece)[-MOST_SAID:]
                    closed |= end == answers and not piece
        in_time = closed or received[answers].endswith(b"\n")
        for end in self._reading[1:]:  # all output before the answer
            while piece := _available(end):
                received[end] = (received[end] + piece)[-MOST_SAID:]
        return [data.decode("utf-8", "replace") for data in received.values()], in_time

    def end(self) -> int:
        """End the process and its children; return its exit code: 0, or the code or signal that ended it before."""
        if self.ended:
            return 0
        self.ended = True
        for end in (self._tasks, *self._reading):
            os.close(end)
        try:
            os.killpg(self._child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            os.kill(self._child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def run_case(seed: int, folder: Path, open_case: Opener, limits: Limits) -> Outcome:
    """Open a case in a process of its own."""
    process = CaseProcess(open_case, limits)
    try:
        return process.open(seed, folder)
    finally:
        process.end()


def _available(end: int) -> bytes:
    try:
        return os.read(end, MOST_SAID)
    except BlockingIOError:
        return b""


def _serve(open_case: Opener, limits: Limits, tasks: int, ends: list[int]) -> NoReturn:
    """Run the process: open cases by lines of folders; answer exit code, bytes, and whether a process is left."""
    try:
        os.setsid()
        answers = os.fdopen(ends[0], "w", encoding="ascii")
        for place, end in zip((0, 1, 2), [os.open(os.devnull, os.O_RDONLY), *ends[1:]], strict=True):
            os.dup2(end, place)
            os.close(end)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(place, "w", encoding="utf-8", closefd=False) for place in (1, 2))  # noqa: SIM115
        for handler in list(logging.getLogger().handlers):  # handlers of tests: logs go to stderr
            logging.getLogger().removeHandler(handler)
        compute_alone()
        with os.fdopen(tasks, encoding="utf-8") as folders:
            for folder in folders:
                answers.write(json.dumps(_opened(open_case, Path(folder[:-1]), limits)) + "\n")
                answers.flush()
    finally:
        os._exit(0)


def _opened(open_case: Opener, folder: Path, limits: Limits) -> tuple[int, int, bool]:
    """Return exit code, bytes at most beyond those before, and whether a process is left."""
    _bound_memory(limits)
    own_peak = _forget_peak()
    trials = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    try:
        code = open_case(folder)
    except BaseException as error:  # Rust's panics are not subclasses of Exception
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else BROKEN
        if code == BROKEN:
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    peak = _peak()
    most_of_trials = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if most_of_trials > trials:
        peak = max(peak, most_of_trials * _UNIT)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return code, max(peak - own_peak, 0), False
    return code, max(peak - own_peak, 0), True


_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of the system's unit of resident memory."""


def _forget_peak() -> int:
    """Reset the peak and return the resident bytes. If that is impossible, return the peak so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def compute_alone() -> None:
    """Let this process compute on one thread: pools of threads do not survive a fork."""
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if dispatch.native:
        dispatch.native.set_threads(1)


@contextmanager
def computing_alone() -> Iterator[None]:
    """Compute on one thread within a block."""
    threads = torch.get_num_threads()
    native = dispatch.native
    native_threads = native.threads() if native else 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
            patch.setenv(name, "1")
        compute_alone()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            if native:
                native.set_threads(native_threads)


def _bound_memory(limits: Limits) -> None:
    """Bound the memory of this process to its current memory plus the limit's bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stacks
    except OSError:
        return
    limit = pages * resource.getpagesize() + limits.bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
