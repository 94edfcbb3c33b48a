"""Engines of `serve` and `batch`: one in this process or in ranks, or several on Ray (`--replicas N`)."""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from triforce.cli import tensor_parallel
from triforce.cli.engine_arguments import load, settings
from triforce.cli.progress import loading
from triforce.cli.tensor_parallel import Command
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.server.batch import Answers
    from triforce.server.engine_client import EngineClient, ServedModel
    from triforce.server.limits import Limits

MAX_REPLICAS = 1024


def replica_count(options: Namespace) -> int:
    """Return the number of replicas; 0 for an engine in this process. Raises RequestError."""
    count: int = options.replicas if options.replicas is not None else int(options.ray_address is not None)
    if options.replicas is not None and not 1 <= count <= MAX_REPLICAS:
        raise RequestError(f"--replicas is {count}; give 1 to {MAX_REPLICAS} engines")
    return count


def run(options: Namespace, command: Command, *, graceful: bool = False) -> int:
    """Run as `tensor_parallel.run` does; with --replicas each replica starts its own ranks."""
    if not replica_count(options):
        return tensor_parallel.run(options, command, graceful=graceful)
    tensor_parallel.require_one_process("a command with --replicas")
    tensor_parallel.rank_count(options)
    return command(options, ALONE)


def engine(options: Namespace, ranks: TPGroup, limits: Limits, purpose: str) -> tuple[ServedModel, EngineClient]:
    """Return a frontend and an engine: replicas, if --replicas asks for them, else a thread. Raises TriforceError.

    purpose: distinguishes the deployments of this machine on one Ray cluster.
    """
    if not (count := replica_count(options)):
        from triforce.server.engine_thread import Worker

        llm = load(options, ranks if ranks.count > 1 else None)
        return llm, Worker(llm, limits)
    with _ray_imports(options):
        from triforce.replicas.cluster import start_replicas

    name = f"triforce {socket.gethostname()} {purpose}"
    with loading(options), _progress(count) as progress:
        return start_replicas(
            _settings(options), limits, count, options.ray_address, name, progress, *_rank_settings(options)
        )


def follow(options: Namespace, ranks: TPGroup, limits: Limits) -> int:
    """Run a rank other than 0. Raises TriforceError."""
    from triforce.server import engine_thread

    engine_thread.follow(load(options, ranks), limits)
    return 0


def answer(options: Namespace, name: str, source: BinaryIO, answers: Answers) -> None:
    """Answer the lines of a batch on Ray Data. Raises TriforceError."""
    with _ray_imports(options):
        from triforce.replicas import ray_data

    with loading(options):
        ray_data.answer(
            _settings(options),
            name,
            replica_count(options),
            options.ray_address,
            source,
            answers,
            *_rank_settings(options),
        )


def _rank_settings(options: Namespace) -> tuple[int, bool]:
    """Return the number of ranks of each replica, and whether their sums are exact."""
    return tensor_parallel.rank_count(options), not options.tp_all_reduce


@contextmanager
def _ray_imports(options: Namespace) -> Iterator[None]:
    """Prepare Ray's environment for imports of Ray in the block. Raises RequestError if Ray is not installed."""
    try:
        from triforce.replicas import ray_env

        ray_env.prepare(options.ray_address)
        yield
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed; get it with: pip install 'triforce[ray]'") from error


def _settings(options: Namespace) -> dict[str, Any]:
    engine_settings = settings(options)
    for name in ("model", "draft"):  # an absolute folder is the same for every replica
        if engine_settings[name] is not None and Path(engine_settings[name]).is_dir():
            engine_settings[name] = str(Path(engine_settings[name]).resolve())
    if "disk_cache" in engine_settings:
        engine_settings["disk_cache"] = str(Path(engine_settings["disk_cache"]).absolute())
    return engine_settings


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that reports running replicas and Ray's messages.

    The bar on stderr is shown on terminals only; messages are printed everywhere, each once.
    """
    from tqdm import tqdm

    status = ""
    with tqdm(desc="replicas", total=count, leave=False, disable=None, file=sys.stderr) as bar:

        def report(running: int, message: str) -> None:
            nonlocal status
            bar.update(running - bar.n)
            if message not in ("", status):
                bar.clear()
                print(message, file=sys.stderr, flush=True)
            status = message

        yield report
