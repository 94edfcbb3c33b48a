"""Starts the ranks of a command, waits for them, and sees that none is left. Imports nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triforce.cli import LOST, MISTAKE
from triforce.distributed import spawn

GRACE = 5.0
"""Seconds in which ranks may end by themselves once the first has ended."""

LOOK = 0.05  # seconds between two looks at them


def launch(count: int, arguments: Sequence[str], *, winds_down: bool = False) -> int:
    """A command line in `count` processes; the exit code of them all.

    winds_down: rank 0 is told of signals, and has its time to end.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="triforce-") as name, _heeding(ranks if winds_down else None):
        folder, (lifeline, held) = Path(name), os.pipe()
        try:
            for rank in range(count):
                ranks.append(_start(rank, count, arguments, folder, lifeline, apart=winds_down))
            return verdict(_wait(ranks), folder)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
            os.close(lifeline)
            os.close(held)


def _start(
    rank: int, count: int, arguments: Sequence[str], folder: Path, lifeline: int, apart: bool
) -> subprocess.Popen[bytes]:
    """Rank 0 has our streams; what the others say goes to a file each. `apart`: a terminal's Ctrl-C is for us alone."""
    run = "from triforce.cli import main; sys.exit(main(sys.argv[1:]))"
    options: dict[str, Any] = {"start_new_session": apart}
    with (folder / f"rank-{rank}").open("wb") as said:
        if rank:
            options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said}
        return spawn.start(run, arguments, spawn.rank_environment(rank, count, folder), lifeline, **options)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes, once all have ended or one of them has ended badly; None of those that do not follow it."""
    while not any(ranks[0].poll() == 0 or process.poll() for process in ranks):
        time.sleep(LOOK)
    patient_until = time.monotonic() + GRACE
    while any(process.poll() is None for process in ranks) and time.monotonic() < patient_until:
        time.sleep(LOOK)
    return [process.returncode for process in ranks]


def verdict(codes: Sequence[int | None], folder: Path) -> int:
    """The exit code of the whole; says which rank was lost, if it has not said so itself."""
    if codes[0] is not None and codes[0] >= 0 and codes[0] != LOST:
        return codes[0]
    ended = [rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)]
    for rank in (ended or [rank for rank, code in enumerate(codes) if code is None])[:1]:
        said = (folder / f"rank-{rank}").read_text(errors="replace").strip()
        told = f"rank {rank} of {len(codes)} {_end(codes[rank])}; so the others were ended, too"
        print(f"triforce: error: {told}", *([said] if said else []), sep="\n", file=sys.stderr)
    return MISTAKE


def _end(code: int | None) -> str:
    if code is None:
        return "no longer answers"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextmanager
def _heeding(told: Sequence[subprocess.Popen[bytes]] | None) -> Iterator[None]:
    """SIGTERM ends the ranks, too; but the first of `told`, if it is there, is told of it, and of SIGINT."""

    def heed(number: int, frame: object) -> None:
        if not told:
            sys.exit(128 + number)
        told[0].send_signal(number)

    numbers = [signal.SIGTERM] if told is None else [signal.SIGTERM, signal.SIGINT]
    before = {number: signal.signal(number, heed) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
