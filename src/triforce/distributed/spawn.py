"""Ranks as processes of one machine: how one starts others, and none of them outlives who started it.

Imports nothing heavy: whoever starts ranks need not be one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.distributed.torch_group import TorchGroup

MEETING, LIFELINE = "TRIFORCE_MEETING", "TRIFORCE_LIFELINE"
"""Variables of ranks: where they meet, and what is closed when whoever started them has died."""


def introduce(rank: int, count: int, folder: Path) -> dict[str, str]:
    """The variables of one of `count` ranks of this machine, who meet in a folder."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        MEETING: f"file://{folder / 'meeting'}", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }  # fmt: skip


def start(
    run: str, arguments: Sequence[str], variables: dict[str, str], lifeline: int, **options: Any
) -> subprocess.Popen[bytes]:
    """A process that runs a line of Python, with the same modules as here; `lifeline` is the end of a pipe to read."""
    # As multiprocessing does, which would import the main module again: the same modules, whatever the folder.
    code = f"import sys; sys.path[:] = {sys.path!r}; {run}"
    environment = os.environ | variables | {LIFELINE: str(lifeline)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, pass_fds=(lifeline,), **options)


def own_device(device: str, local: int) -> str:
    """Of a device that all ranks were told of, the one of this rank. Raises RequestError."""
    import torch

    if not (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())):
        return device
    if device not in ("auto", "cuda"):
        raise RequestError(f"--device {device} is one device, and each rank has its own; use --device cuda")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def join(count: int, device: str, exact: bool) -> TorchGroup:
    """Be the rank that the variables say, of so many. `device`: its own. Raises RankError."""
    from triforce.distributed.torch_group import TorchGroup

    if lifeline := os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()
    return TorchGroup(
        int(os.environ["RANK"]), count, os.environ.get(MEETING, "env://"), device.startswith("cuda"), exact=exact
    )


def _end_with(lifeline: int) -> None:
    """Whoever started this rank holds the other end: without it nobody would end a rank that waits for ever."""
    os.read(lifeline, 1)
    sys.stderr.flush()
    os._exit(1)
