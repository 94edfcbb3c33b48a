"""Several processes for one command. `--tp N` starts them and watches over them; torchrun does so from outside.

Each rank runs the same command with the same arguments. Rank 0 reads and prints; what the others have to say is shown
when they are what went wrong.
"""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from triforce.distributed import spawn
from triforce.errors import RequestError
from triforce.imports import import_torch

if TYPE_CHECKING:
    from triforce.distributed.group import TPGroup

MOST = 64
"""Processes: the KV heads of a model set a lower limit, but are not known yet."""

Command = Callable[[Namespace, "TPGroup"], int]


def run(options: Namespace, command: Command, *, winds_down: bool = False) -> int:
    """The command, in as many processes as the options or torchrun want. Raises RequestError.

    winds_down: told to end by a signal, rank 0 ends when it is ready, and the others with it.
    """
    started = _started(os.environ)
    count = wanted(options, started)
    if started > 1:
        if options.tp not in (None, started):
            raise RequestError(f"--tp is {options.tp}, but {started} processes were started; leave out --tp")
        if winds_down and os.environ["RANK"] != "0":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        return _as_rank(options, command, started)
    if count > 1:
        from triforce.cli.tp_launcher import launch

        return launch(count, options.arguments, winds_down=winds_down)
    import_torch()
    from triforce.distributed.group import ALONE

    return command(options, ALONE)


def wanted(options: Namespace, started: int = 1) -> int:
    """How many processes are to share a model, of which so many were started. Raises RequestError."""
    count: int = options.tp if options.tp is not None else 1
    if not 1 <= count <= MOST:
        raise RequestError(f"--tp is {count}; give 1 to {MOST} processes")
    if options.tp_all_reduce and max(count, started) == 1:
        raise RequestError("--tp-all-reduce says how processes share sums; give their number with --tp, such as --tp 2")
    return count


def refuse(what: str) -> None:
    """For what is done in one process. Raises RequestError where torchrun has started several."""
    if _started(os.environ) > 1:
        raise RequestError(f"{what} starts in one process; start it without torchrun")


def _started(environment: Mapping[str, str]) -> int:
    """How many ranks there are, if this is one of them."""
    met = spawn.MEETING in environment or "MASTER_ADDR" in environment
    return int(environment.get("WORLD_SIZE", 1)) if met and "RANK" in environment else 1


def _as_rank(options: Namespace, command: Command, count: int) -> int:
    from triforce.backends.cuda import graphs

    options.device = spawn.own_device(options.device, int(os.environ.get("LOCAL_RANK", 0)))
    _share_processors(int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    ranks = spawn.join(count, options.device, not options.tp_all_reduce)
    try:
        return command(options, ranks)
    finally:
        graphs.forget()
        ranks.leave()


def _share_processors(ranks: int) -> None:
    """All ranks of a machine at once: more threads than processors would wait for each other."""
    from triforce.backends import native_loader

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    native_loader.use_threads(max(1, usable // ranks))
