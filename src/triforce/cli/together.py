"""Several processes for one command. `--tp N` starts them and watches over them; torchrun does so from outside.

Each rank runs the same command with the same arguments. Rank 0 reads and prints; what the others have to say is shown
when they are what went wrong.
"""

from __future__ import annotations

import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.ranks import Ranks

MEETING, LIFELINE = "TRIFORCE_MEETING", "TRIFORCE_LIFELINE"
"""Variables of ranks that `--tp` starts: where they meet, and what is closed when whoever started them has died."""

MOST = 64
"""Processes: the KV heads of a model set a lower limit, but are not known yet."""

Command = Callable[[Namespace, "Ranks"], int]


def run(options: Namespace, command: Command) -> int:
    """The command, in as many processes as the options or torchrun want. Raises RequestError."""
    wanted = options.tp if options.tp is not None else 1
    if not 1 <= wanted <= MOST:
        raise RequestError(f"--tp is {wanted}; give 1 to {MOST} processes")
    started = _started(os.environ)
    if options.tp_reduce and max(wanted, started) == 1:
        raise RequestError("--tp-reduce says how processes share sums; give their number with --tp, such as --tp 2")
    if started > 1:
        if options.tp not in (None, started):
            raise RequestError(f"--tp is {options.tp}, but {started} processes were started; leave out --tp")
        return _as_rank(options, command, started)
    if wanted > 1:
        from triforce.cli.launch import launch

        return launch(wanted, options.arguments)
    from triforce.ranks import ALONE

    return command(options, ALONE)


def refuse(command: str) -> None:
    """For commands of one process. Raises RequestError where torchrun has started several."""
    if _started(os.environ) > 1:
        raise RequestError(f"{command} runs in one process; start it without torchrun (generate can be shared)")


def _started(environment: Mapping[str, str]) -> int:
    """How many ranks there are, if this is one of them."""
    met = MEETING in environment or "MASTER_ADDR" in environment
    return int(environment.get("WORLD_SIZE", 1)) if met and "RANK" in environment else 1


def _as_rank(options: Namespace, command: Command, count: int) -> int:
    import torch

    from triforce.kernels import graphs
    from triforce.processes import Processes

    if lifeline := os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
    cuda = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
    if cuda:
        if options.device not in ("auto", "cuda"):
            raise RequestError(f"--device {options.device} is one device, and each rank has its own; use --device cuda")
        options.device = f"cuda:{local}"
        torch.cuda.set_device(local)
    _share_processors(int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    ranks = Processes(rank, count, os.environ.get(MEETING, "env://"), cuda, exact=not options.tp_reduce)
    try:
        return command(options, ranks)
    finally:
        graphs.forget()
        ranks.leave()


def _share_processors(ranks: int) -> None:
    """All ranks of a machine at once: more threads than processors would wait for each other."""
    from triforce.kernels import extension

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    extension.use_threads(max(1, usable // ranks))


def _end_with(lifeline: int) -> None:
    """Whoever started this rank holds the other end: without it nobody would end a rank that waits for ever."""
    os.read(lifeline, 1)
    sys.stderr.flush()
    os._exit(1)
