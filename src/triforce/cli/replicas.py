"""The engine of a command of the extra `serve`: in this process, in ranks, or several on Ray (`--replicas N`)."""

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

MOST = 1024


@contextmanager
def extra(name: str = "serve") -> Iterator[None]:
    """Imports in here may fail. Raises RequestError saying how to get what is missing: the extra of that name."""
    try:
        yield
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed; get it with: pip install 'triforce[{name}]'") from error


def wanted(options: Namespace) -> int:
    """Return the number of replicas; 0 for an engine in this process. Raises RequestError."""
    count: int = options.replicas if options.replicas is not None else int(options.ray_address is not None)
    if options.replicas is not None and not 1 <= count <= MOST:
        raise RequestError(f"--replicas is {count}; give 1 to {MOST} engines")
    return count


def run(options: Namespace, command: Command, *, graceful: bool = False) -> int:
    """Run as `tensor_parallel.run` does; but with replicas it is they who have ranks."""
    if not wanted(options):
        return tensor_parallel.run(options, command, graceful=graceful)
    tensor_parallel.refuse("what has replicas")
    tensor_parallel.wanted(options)
    return command(options, ALONE)


def engine(options: Namespace, ranks: TPGroup, limits: Limits, purpose: str) -> tuple[ServedModel, EngineClient]:
    """Return a frontend and an engine: replicas, if they are wanted, or a thread. Raises TriforceError.

    purpose: tells apart what this machine has on one Ray.
    """
    if not (count := wanted(options)):
        from triforce.server.engine_thread import Worker

        llm = load(options, ranks if ranks.count > 1 else None)
        return llm, Worker(llm, limits)
    with _importing(options):
        from triforce.replicas.cluster import start_replicas

    name = f"triforce {socket.gethostname()} {purpose}"
    with loading(options), _progress(count) as progress:
        return start_replicas(_settings(options), limits, count, options.ray_address, name, progress, *_shared(options))


def follow(options: Namespace, ranks: TPGroup, limits: Limits) -> int:
    """Run a rank other than the first. Raises TriforceError."""
    from triforce.server import engine_thread

    engine_thread.follow(load(options, ranks), limits)
    return 0


def answer(options: Namespace, name: str, source: BinaryIO, answers: Answers) -> None:
    """Answer the lines of a batch, on Ray Data. Raises TriforceError."""
    with _importing(options):
        from triforce.replicas import ray_data

    with loading(options):
        ray_data.answer(
            _settings(options), name, wanted(options), options.ray_address, source, answers, *_shared(options)
        )


def _shared(options: Namespace) -> tuple[int, bool]:
    """Return the ranks of each replica, and whether their sums are exact."""
    return tensor_parallel.wanted(options), not options.tp_all_reduce


@contextmanager
def _importing(options: Namespace) -> Iterator[None]:
    """Imports of Ray go in here. Raises RequestError where it is not installed."""
    with extra("ray"):
        from triforce.replicas import ray_env

        ray_env.prepare(options.ray_address)
        yield


def _settings(options: Namespace) -> dict[str, Any]:
    given = settings(options)
    for name in ("model", "draft"):  # a folder is the same one wherever a replica works
        if given[name] is not None and Path(given[name]).is_dir():
            given[name] = str(Path(given[name]).resolve())
    if "disk_cache" in given:
        given["disk_cache"] = str(Path(given["disk_cache"]).absolute())
    return given


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr, on terminals only; what Ray has to say is printed anywhere, once."""
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
