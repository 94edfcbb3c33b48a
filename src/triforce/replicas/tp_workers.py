"""The other ranks of a replica: processes on its machine that do as it does. None of them outlives another."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from triforce.backends import native_loader
from triforce.distributed import spawn
from triforce.errors import RankError, TriforceError
from triforce.llm import LLM
from triforce.server.limits import Limits
from triforce.server.tp_mirror import follow

GRACE = 1.0
"""Seconds in which whoever waits for a text is told that it is lost."""
_RUN = "from triforce.replicas.tp_workers import run; run()"


def accompanied(settings: dict[str, Any], limits: Limits, count: int, exact: bool, threads: int) -> dict[str, Any]:
    """Start the other ranks of an LLM with these settings, and be the first of `count`: what that changes of them.

    All have so many threads, and of the limits they keep what `Crew` does. Raises RankError or RequestError.
    """
    lifeline, _ = os.pipe()  # the other end is closed when this process ends
    told = pickle.dumps((settings, limits, exact, threads))
    with tempfile.TemporaryDirectory(prefix="triforce-") as folder:
        for rank in range(1, count):
            variables = spawn.introduce(rank, count, Path(folder))
            process = spawn.start(_RUN, [], variables, lifeline, stdin=subprocess.PIPE)
            Thread(target=_end_with, args=(process,), daemon=True).start()
            assert process.stdin
            with process.stdin as stdin:
                stdin.write(told)
        os.close(lifeline)
        os.environ |= spawn.introduce(0, count, Path(folder))
        return _joined(settings["device"], exact)


def run() -> None:
    """What one of them is. A mistake in the settings is said by the first."""
    settings, limits, exact, threads = pickle.load(sys.stdin.buffer)
    native_loader.use_threads(threads)
    joined = _joined(settings["device"], exact)
    try:
        llm = LLM(**settings | joined)
    except RankError:
        raise
    except TriforceError:
        return
    follow(llm, limits)


def _joined(device: str, exact: bool) -> dict[str, Any]:
    own = spawn.own_device(device, int(os.environ["LOCAL_RANK"]))
    ranks = spawn.join(int(os.environ["WORLD_SIZE"]), own, exact)
    ranks.meet()  # nobody looks into the folder any more
    return {"device": own, "ranks": ranks}


def _end_with(process: subprocess.Popen[bytes]) -> None:
    """Nothing goes on without it. Ray starts another replica, which has others."""
    if process.wait():
        sleep(GRACE)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(1)
