"""Spawn ranks as processes of one machine; ranks end when the process that started them ends.

This module imports nothing heavy, as the process that starts ranks need not be one.
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

MEETING = "TRIFORCE_MEETING"
"""Environment variable of ranks: the URL where they meet."""
LIFELINE = "TRIFORCE_LIFELINE"
"""Environment variable of ranks: a pipe that closes when the process that started them dies."""


def rank_environment(rank: int, count: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of one of `count` ranks of this machine, which meet in a folder."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        MEETING: f"file://{folder / 'meeting'}", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }  # fmt: skip


def start(
    run: str, arguments: Sequence[str], variables: dict[str, str], lifeline: int, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process that runs the Python line `run`, with this process's sys.path. lifeline: read end of a pipe."""
    # The same modules, whatever the folder; multiprocessing does so too, but would import the main module again.
    code = f"import sys; sys.path[:] = {sys.path!r}; {run}"
    environment = os.environ | variables | {LIFELINE: str(lifeline)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, pass_fds=(lifeline,), **options)


def own_device(device: str, local: int) -> str:
    """Return this rank's device, of the kind `device` that all ranks share. Raises RequestError."""
    import torch

    if not (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())):
        return device
    if device not in ("auto", "cuda"):
        raise RequestError(f"--device {device} is one device, and each rank has its own; use --device cuda")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def join(count: int, device: str, exact: bool) -> TorchGroup:
    """Join the group of `count` ranks as the environment's rank. device: this rank's own. Raises RankError."""
    from triforce.distributed.torch_group import TorchGroup

    if lifeline := os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()
    return TorchGroup(
        int(os.environ["RANK"]), count, os.environ.get(MEETING, "env://"), device.startswith("cuda"), exact=exact
    )


def _end_with(lifeline: int) -> None:
    """End this process when the pipe's other end closes; a rank that waits for ever would otherwise stay."""
    os.read(lifeline, 1)
    sys.stderr.flush()
    os._exit(1)
