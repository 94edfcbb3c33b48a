"""Several processes for one command. `--tp N` starts them and watches over them; torchrun does so from outside.

Each rank runs the same command with the same arguments. Rank 0 reads and prints; what the others have to say is shown
when they are what went wrong.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triforce.cli import LOST, MISTAKE
from triforce.distributed import spawn
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import RequestError

MOST = 64
"""Processes: the KV heads of a model set a lower limit, but are not known yet."""

GRACE = 5.0
"""Seconds in which ranks may end by themselves once the first has ended."""

POLL_SECONDS = 0.05

Command = Callable[[Namespace, TPGroup], int]


def run(options: Namespace, command: Command, *, graceful: bool = False) -> int:
    """The command, in as many processes as the options or torchrun want. Raises RequestError.

    graceful: on a signal rank 0 ends when it is ready, and the others with it.
    """
    started = _started()
    count = wanted(options, started)
    if started > 1:
        if options.tp not in (None, started):
            raise RequestError(f"--tp is {options.tp}, but {started} processes were started; leave out --tp")
        if graceful and os.environ["RANK"] != "0":
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        return _as_rank(options, command, started)
    if count > 1:
        return launch(count, options.arguments, graceful=graceful)
    return command(options, ALONE)


def wanted(options: Namespace, started: int = 1) -> int:
    """Return the number of ranks, given how many were started. Raises RequestError."""
    count: int = options.tp if options.tp is not None else 1
    if not 1 <= count <= MOST:
        raise RequestError(f"--tp is {count}; give 1 to {MOST} processes")
    if max(count, started) > 1 and getattr(options, "disk_cache", None):
        raise RequestError("a disk cache is of one process; leave out --tp and torchrun, or --disk-cache")
    if options.tp_all_reduce and max(count, started) == 1:
        raise RequestError("--tp-all-reduce says how processes share sums; give their number with --tp, such as --tp 2")
    return count


def refuse(what: str) -> None:
    """Raise RequestError where torchrun has started several processes for a command of one."""
    if _started() > 1:
        raise RequestError(f"{what} starts in one process; start it without torchrun")


def _started() -> int:
    """Return the number of ranks, if this is one of them."""
    met = spawn.MEETING in os.environ or "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", 1)) if met and "RANK" in os.environ else 1


def _as_rank(options: Namespace, command: Command, count: int) -> int:
    from triforce.backends.cuda import graphs

    options.device = spawn.own_device(options.device, int(os.environ.get("LOCAL_RANK", 0)))
    _share_processors(int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    ranks = spawn.join(count, options.device, not options.tp_all_reduce)
    try:
        return command(options, ranks)
    finally:
        graphs.clear_graphs()
        ranks.leave()


def _share_processors(ranks: int) -> None:
    """Share the machine's processors among its ranks: more threads than processors would wait for each other."""
    from triforce.backends import dispatch

    dispatch.use_threads(max(1, dispatch.usable_cpus() // ranks))


def launch(count: int, arguments: Sequence[str], *, graceful: bool = False) -> int:
    """A command line in `count` processes; the exit code of them all.

    graceful: rank 0 is sent the signals, and has its time to end.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="triforce-") as name, _signals_forwarded(ranks if graceful else None):
        folder = Path(name)
        (lifeline, held) = os.pipe()
        try:
            for rank in range(count):
                ranks.append(_start(rank, count, arguments, folder, lifeline, detached=graceful))
            return verdict(_wait(ranks), folder)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
            os.close(lifeline)
            os.close(held)


def _start(
    rank: int, count: int, arguments: Sequence[str], folder: Path, lifeline: int, detached: bool
) -> subprocess.Popen[bytes]:
    """Rank 0 has our streams; what the others say goes to a file each. `detached`: Ctrl-C is for us alone."""
    run = "from triforce.__main__ import main; sys.exit(main())"
    options: dict[str, Any] = {"start_new_session": detached}
    with (folder / f"rank-{rank}").open("wb") as said:
        if rank:
            options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said}
        return spawn.start(run, arguments, spawn.rank_environment(rank, count, folder), lifeline, **options)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes, once all have ended or one of them has ended badly; None of those that do not follow it."""
    while not any(ranks[0].poll() == 0 or process.poll() for process in ranks):
        time.sleep(POLL_SECONDS)
    patient_until = time.monotonic() + GRACE
    while any(process.poll() is None for process in ranks) and time.monotonic() < patient_until:
        time.sleep(POLL_SECONDS)
    return [process.returncode for process in ranks]


def verdict(codes: Sequence[int | None], folder: Path) -> int:
    """The exit code of the whole; says which rank was lost, if it has not said so itself."""
    if codes[0] is not None and codes[0] >= 0 and codes[0] != LOST:
        return codes[0]
    ended = [rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)]
    for rank in (ended or [rank for rank, code in enumerate(codes) if code is None])[:1]:
        said = (folder / f"rank-{rank}").read_text(errors="replace").strip()
        message = f"rank {rank} of {len(codes)} {_end(codes[rank])}; so the others were ended, too"
        print(f"triforce: error: {message}", *([said] if said else []), sep="\n", file=sys.stderr)
    return MISTAKE


def _end(code: int | None) -> str:
    if code is None:
        return "no longer answers"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextmanager
def _signals_forwarded(ranks: Sequence[subprocess.Popen[bytes]] | None) -> Iterator[None]:
    """SIGTERM and SIGHUP end the ranks, too; but if `ranks` are given, the first is sent them, and SIGINT.

    A SIGHUP that is ignored, as `nohup` has it, stays so.
    """

    def handle(number: int, frame: object) -> None:
        if not ranks:
            sys.exit(128 + number)
        ranks[0].send_signal(number)

    numbers = [signal.SIGTERM] if ranks is None else [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
