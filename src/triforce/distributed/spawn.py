"""Spawn ranks as processes of one machine; ranks end when the process that started them ends.

The process that starts ranks needs neither numpy nor torch, and a rank imports torch only for a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.errors import RankError, RequestError
from triforce.installed import has_cuda

if TYPE_CHECKING:
    from triforce.distributed.socket_group import SocketGroup

MEETING = "TRIFORCE_MEETING"
"""Environment variable of ranks: the URL where they meet."""
LIFELINE = "TRIFORCE_LIFELINE"
"""Environment variable of ranks: a pipe that closes when the process that started them dies."""


def rank_environment(rank: int, count: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of one of `count` ranks of this machine, which meet in a folder."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        MEETING: (folder / "meeting").as_uri(),
    }  # fmt: skip


def start(
    run: str, arguments: Sequence[str], variables: dict[str, str], lifeline: int, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process that runs the Python line `run`, with this process's sys.path. lifeline: read end of a pipe."""
    # The new process imports the same modules, from any working directory. multiprocessing would do so, too, but would
    # import the main module again.
    code = f"import sys; sys.path[:] = {sys.path!r}; {run}"
    environment = os.environ | variables | {LIFELINE: str(lifeline)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, pass_fds=(lifeline,), **options)


def own_device(device: str, local: int) -> str:
    """Return this rank's device, of the kind `device` that all ranks share; `auto` is cuda where present.

    local: number of this rank among those of its machine. Raises RequestError.
    """
    if device == "auto":
        device = "cuda" if has_cuda() else "cpu"
    if not device.startswith("cuda"):
        return device
    if device != "cuda":
        raise RequestError(f"--device {device} is one device, and each rank has its own; use --device cuda")
    import torch

    torch.cuda.set_device(local)
    return f"cuda:{local}"


def join(count: int, device: str, exact: bool) -> SocketGroup:
    """Join the group of `count` ranks, as the rank that the environment names. Raises RankError.

    device: this rank's own.
    """
    if lifeline := os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()
    group: type[SocketGroup]
    if device.startswith("cuda"):
        from triforce.distributed.nccl_group import NcclGroup as group
    else:
        from triforce.distributed.socket_group import SocketGroup as group
    return group(int(os.environ["RANK"]), count, _meeting(), exact)


def _meeting() -> str:
    """Return the URL where the ranks meet: that of the process that started them, or a port by torchrun's variables.

    Raises RankError if torchrun's variables are missing.
    """
    if url := os.environ.get(MEETING):
        return url
    try:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise RankError("MASTER_ADDR and MASTER_PORT do not say where the ranks meet; torchrun sets both") from error
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        host = "127.0.0.1"  # all ranks are on this machine: the port is closed to others
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at the port
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _end_with(lifeline: int) -> None:
    """End this process when the pipe's other end closes; a rank that waits for ever would otherwise stay."""
    os.read(lifeline, 1)
    sys.stderr.flush()
    os._exit(1)
