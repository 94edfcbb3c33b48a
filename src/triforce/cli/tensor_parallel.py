"""Several processes for one command. `--tp N` starts and supervises them; torchrun does so from outside.

Each rank runs the same command with the same arguments. Rank 0 reads and prints; messages of another rank are shown
if that rank failed.
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

from triforce.cli import MISTAKE, RANK_LOST
from triforce.distributed import spawn
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import RequestError

MAX_PROCESSES = 64
"""Processes at most. The KV heads of a model set a lower limit, but are not known yet."""

GRACE_SECONDS = 5.0
"""Seconds in which ranks may end by themselves once the first has ended."""

POLL_SECONDS = 0.05

Command = Callable[[Namespace, TPGroup], int]


def run(options: Namespace, command: Command, *, graceful: bool = False) -> int:
    """Run `command` in as many processes as the options or torchrun ask for; return the exit code.

    graceful: on a signal rank 0 ends when it is ready, and the others with it. Raises RequestError.
    """
    started_count = _started_ranks()
    count = rank_count(options, started_count)
    if started_count > 1:
        if options.tp not in (None, started_count):
            raise RequestError(f"--tp is {options.tp}, but {started_count} processes were started; leave out --tp")
        if graceful and os.environ["RANK"] != "0":
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        return _as_rank(options, command, started_count)
    if count > 1:
        return launch(count, options.arguments, graceful=graceful)
    return command(options, ALONE)


def rank_count(options: Namespace, started_count: int = 1) -> int:
    """Return the number of ranks that --tp asks for. started_count: ranks that were started. Raises RequestError."""
    count: int = options.tp if options.tp is not None else 1
    if not 1 <= count <= MAX_PROCESSES:
        raise RequestError(f"--tp is {count}; give 1 to {MAX_PROCESSES} processes")
    if max(count, started_count) > 1 and getattr(options, "disk_cache", None):
        raise RequestError("a disk cache works with one process only; leave out --tp and torchrun, or --disk-cache")
    if options.tp_all_reduce and max(count, started_count) == 1:
        raise RequestError("--tp-all-reduce says how processes share sums; give their number with --tp, such as --tp 2")
    return count


def require_one_process(command_name: str) -> None:
    """Raise RequestError if torchrun has started several processes for a command of one."""
    if _started_ranks() > 1:
        raise RequestError(f"{command_name} starts in one process; start it without torchrun")


def _started_ranks() -> int:
    """Return the number of ranks that were started, this one among them; 1 if this process is no rank."""
    has_address = spawn.MEETING in os.environ or "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", 1)) if has_address and "RANK" in os.environ else 1


def _as_rank(options: Namespace, command: Command, count: int) -> int:
    options.device = spawn.own_device(options.device, int(os.environ.get("LOCAL_RANK", 0)))
    _share_processors(int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    ranks = spawn.join(count, options.device, not options.tp_all_reduce)
    try:
        return command(options, ranks)
    finally:
        if options.device.startswith("cuda"):
            from triforce.backends.cuda import graphs

            graphs.clear_graphs()
        ranks.leave()


def _share_processors(ranks: int) -> None:
    """Divide the machine's processors among its ranks: more threads than processors would wait for each other."""
    from triforce.backends import dispatch

    dispatch.use_threads(max(1, dispatch.usable_cpus() // ranks))


def launch(count: int, arguments: Sequence[str], *, graceful: bool = False) -> int:
    """Run a command line in `count` processes; return their joint exit code.

    graceful: signals go to rank 0, which may take its time to end.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with (
        tempfile.TemporaryDirectory(prefix="triforce-") as folder_name,
        _signals_forwarded(ranks if graceful else None),
    ):
        folder = Path(folder_name)
        (lifeline, lifeline_end) = os.pipe()
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
            os.close(lifeline_end)


def _start(
    rank: int, count: int, arguments: Sequence[str], folder: Path, lifeline: int, detached: bool
) -> subprocess.Popen[bytes]:
    """Start a rank. Rank 0 has this process's streams; stderr of every other rank goes to a file.

    detached: the rank has a session of its own, so that Ctrl-C reaches this process only.
    """
    code = "from triforce.__main__ import main; sys.exit(main())"
    options: dict[str, Any] = {"start_new_session": detached}
    with (folder / f"rank-{rank}").open("wb") as message_file:
        if rank:
            options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": message_file}
        return spawn.start(code, arguments, spawn.rank_environment(rank, count, folder), lifeline, **options)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until rank 0 has ended or a rank has failed, then up to GRACE_SECONDS for the others; return exit codes.

    None stands for a rank that still runs.
    """
    while not any(ranks[0].poll() == 0 or process.poll() for process in ranks):
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return [process.returncode for process in ranks]


def verdict(codes: Sequence[int | None], folder: Path) -> int:
    """Return the joint exit code. Prints which rank failed, unless rank 0 has reported an error itself."""
    if codes[0] is not None and codes[0] >= 0 and codes[0] != RANK_LOST:
        return codes[0]
    failed_ranks = [rank for rank, code in enumerate(codes) if code not in (None, 0, RANK_LOST)]
    for rank in (failed_ranks or [rank for rank, code in enumerate(codes) if code is None])[:1]:
        rank_messages = (folder / f"rank-{rank}").read_text(errors="replace").strip()
        message = f"rank {rank} of {len(codes)} {_ending_text(codes[rank])}; so the others were ended, too"
        print(f"triforce: error: {message}", *([rank_messages] if rank_messages else []), sep="\n", file=sys.stderr)
    return MISTAKE


def _ending_text(code: int | None) -> str:
    if code is None:
        return "no longer answers"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextmanager
def _signals_forwarded(ranks: Sequence[subprocess.Popen[bytes]] | None) -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP, which ends the ranks. With `ranks`, forward both and SIGINT to the first instead.

    An ignored SIGHUP, as under `nohup`, stays ignored.
    """

    def handle(number: int, frame: object) -> None:
        if not ranks:
            sys.exit(128 + number)
        ranks[0].send_signal(number)

    numbers = [signal.SIGTERM] if ranks is None else [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    earlier_handlers = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
