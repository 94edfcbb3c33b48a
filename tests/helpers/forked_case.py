"""One case of a fuzz in a forked process, with limits on time and memory: what it said, took, and whether that will do.

The process is a copy of its parent, so that no case pays for an interpreter, and none finds what another has left.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, NamedTuple, NoReturn

BROKEN = 70
"""The exit code of a case that raised what nobody has caught."""
MOST_SAID = 1 << 16
"""Bytes of each stream that are looked at."""
SIGNS = ("Traceback", "panicked at", "Exception ignored", "terminate called")
"""What is never said of a stranger's file."""

Opener = Callable[[Path], int]
"""Opens the case in a folder as users do; returns an exit code, 0 or 2. Assertions of its own may fail."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a case: seconds by the clock, bytes beyond those of the parent, and characters of the one line."""

    seconds: float = 10.0
    bytes: int = 1 << 30
    line: int = 1000


class Outcome(NamedTuple):
    """What came of a case. fault: what is wrong with that; "" where nothing is. said: the end of stderr."""

    seed: int
    code: int
    fault: str
    said: str
    seconds: float
    bytes: int


def run_case(seed: int, folder: Path, open_case: Opener, limits: Limits) -> Outcome:
    """Open a case in a forked process. Whatever that process leaves running is killed."""
    held, began = _own_bytes(), monotonic()
    reading = [os.pipe(), os.pipe()]
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: of parents with threads
        child = os.fork()
    if not child:
        _become_case(folder, open_case, limits, [end for _, end in reading])
    for _, end in reading:
        os.close(end)
    streams = [open(end, "rb", buffering=0) for end, _ in reading]  # noqa: SIM115  closed below
    out, err, in_time = _listen(streams, began + limits.seconds)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    _end_group(child)
    for stream in streams:
        stream.close()
    used = max(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) - held, 0)
    code, seconds = os.waitstatus_to_exitcode(status), monotonic() - began
    fault = "" if in_time else f"it was not done after {limits.seconds:g} s"
    fault = fault or f"it took {used >> 20} MiB" * (used > limits.bytes) or _fault(code, out, err, limits)
    return Outcome(seed, code, fault, err[-4000:], round(seconds, 3), used)


def _own_bytes() -> int:
    """Return the memory that this process holds, which a fork begins with; where that is not told, its most so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _listen(streams: list[IO[bytes]], deadline: float) -> tuple[str, str, bool]:
    """Return what comes out of two pipes until both are closed, and whether that was before the deadline."""
    held = {stream: b"" for stream in streams}
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and monotonic() < deadline:
            for key, _ in selector.select(max(deadline - monotonic(), 0)):
                piece = os.read(key.fd, MOST_SAID)
                held[key.fileobj] = (held[key.fileobj] + piece)[-MOST_SAID:]  # type: ignore[index]
                if not piece:
                    selector.unregister(key.fileobj)
        in_time = not selector.get_map()
    out, err = (data.decode("utf-8", "replace") for data in held.values())
    return out, err, in_time


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _fault(code: int, out: str, err: str, limits: Limits) -> str:
    """Return what is wrong with an end: more than one line for a refusal, escapes, a traceback, another exit code."""
    if sign := next((sign for sign in SIGNS if sign in out + err), ""):
        return f"it said {sign!r}"
    if code not in (0, 2):
        return f"it ended with {code}"
    if not all(character.isprintable() or character == "\n" for character in out + err):
        return "it printed what is not to be printed"
    one = err.startswith("triforce: error: ") and err.count("\n") == 1 and len(err) <= limits.line
    return "" if code == 0 or one else "its refusal is not one line"


def _become_case(folder: Path, open_case: Opener, limits: Limits, ends: list[int]) -> NoReturn:
    """Be the process of a case, and end with its exit code."""
    code = BROKEN
    try:
        os.setsid()
        for place, end in zip((0, 1, 2), [os.open(os.devnull, os.O_RDONLY), *ends], strict=True):
            os.dup2(end, place)
            os.close(end)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(place, "w", encoding="utf-8", closefd=False) for place in (1, 2))  # noqa: SIM115
        for handler in list(logging.getLogger().handlers):  # those of tests: what is logged goes to stderr
            logging.getLogger().removeHandler(handler)
        _limit(limits)
        code = open_case(folder)
    except BaseException as error:  # Rust's panics are no Exception
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else BROKEN
        if code == BROKEN:
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _limit(limits: Limits) -> None:
    """Bound the memory of this process, and let it compute on one thread: pools of threads do not survive a fork."""
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    loader = sys.modules.get("triforce.backends.native_loader")
    if loader and loader.native:
        loader.native.set_threads(1)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stacks
    except OSError:
        return
    most = pages * resource.getpagesize() + limits.bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
