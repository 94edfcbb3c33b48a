"""Ranks of a replica beyond the first: processes on its machine. If one rank ends, all of them end."""

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

from triforce.backends import dispatch
from triforce.distributed import spawn
from triforce.errors import RankError, TriforceError
from triforce.llm import LLM
from triforce.server.engine_thread import follow
from triforce.server.limits import Limits

EXIT_SECONDS = 1.0
"""Seconds before the exit, in which clients receive the error of their lost text."""
_RUN = "from triforce.replicas.tp_workers import run; run()"


def start_ranks(settings: dict[str, Any], limits: Limits, count: int, exact: bool, threads: int) -> dict[str, Any]:
    """Start ranks 1 to `count` - 1 and join them as rank 0. Returns the settings of LLM that change.

    limits: of the server; ranks use the ones that `TPMirror` names. threads: number of threads of each rank. Raises
    RankError or RequestError.
    """
    lifeline, _ = os.pipe()  # the write end closes when this process ends
    payload = pickle.dumps((settings, limits, exact, threads))
    with tempfile.TemporaryDirectory(prefix="triforce-") as folder:
        for rank in range(1, count):
            variables = spawn.rank_environment(rank, count, Path(folder))
            process = spawn.start(_RUN, [], variables, lifeline, stdin=subprocess.PIPE)
            Thread(target=_exit_after, args=(process,), daemon=True).start()
            assert process.stdin
            with process.stdin as stdin:
                stdin.write(payload)
        os.close(lifeline)
        os.environ |= spawn.rank_environment(0, count, Path(folder))
        return _join_group(settings["device"], exact)


def run() -> None:
    """Run a rank other than the first. The first rank reports errors in the settings."""
    settings, limits, exact, threads = pickle.load(sys.stdin.buffer)
    dispatch.use_threads(threads)
    joined = _join_group(settings["device"], exact)
    try:
        llm = LLM(**settings | joined)
    except RankError:
        raise
    except TriforceError:
        return
    follow(llm, limits)


def _join_group(device: str, exact: bool) -> dict[str, Any]:
    rank_device = spawn.own_device(device, int(os.environ["LOCAL_RANK"]))
    ranks = spawn.join(int(os.environ["WORLD_SIZE"]), rank_device, exact)
    ranks.barrier()  # after it no rank reads the temporary folder
    return {"device": rank_device, "ranks": ranks}


def _exit_after(process: subprocess.Popen[bytes]) -> None:
    """Exit this process when `process` fails. Ray then starts another replica with new ranks."""
    if process.wait():
        sleep(EXIT_SECONDS)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(1)
