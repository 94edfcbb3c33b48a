"""Several engines behind one command: `--replicas N` and `--ray-address` put them on Ray."""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from triforce.cli import tensor_parallel
from triforce.cli.common import load, settings
from triforce.cli.serve_common import extra
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.cli.tensor_parallel import Command
    from triforce.distributed.group import TPGroup
    from triforce.server.batch_file import Answers
    from triforce.server.engine_client import EngineClient, ServedModel
    from triforce.server.limits import Limits

MOST = 1024


def wanted(options: Namespace) -> int:
    """How many replicas; 0 is none, but an engine in this process. Raises RequestError."""
    count: int = options.replicas if options.replicas is not None else int(options.ray_address is not None)
    if options.replicas is not None and not 1 <= count <= MOST:
        raise RequestError(f"--replicas is {count}; give 1 to {MOST} engines")
    return count


def run(options: Namespace, command: Command, *, winds_down: bool = False) -> int:
    """As `together.run`; but where replicas are wanted it is they who have ranks."""
    if not wanted(options):
        return tensor_parallel.run(options, command, winds_down=winds_down)
    tensor_parallel.refuse("what has replicas")
    tensor_parallel.wanted(options)
    from triforce.distributed.group import ALONE

    return command(options, ALONE)


def engine(options: Namespace, ranks: TPGroup, limits: Limits, purpose: str) -> tuple[ServedModel, EngineClient]:
    """What is served, and what makes its texts: replicas, if they are wanted, or a thread. Raises TriforceError.

    purpose: tells apart what this machine has on one Ray.
    """
    if wanted(options):
        return _replicas(options, limits, purpose)
    from triforce.server.engine_thread import Worker

    llm = load(options, ranks if ranks.count > 1 else None)
    return llm, Worker(llm, limits)


def _replicas(options: Namespace, limits: Limits, purpose: str) -> tuple[ServedModel, EngineClient]:
    with _importing(options):
        from triforce.replicas.cluster import replicated

    name, count = f"triforce {socket.gethostname()} {purpose}", wanted(options)
    with _Progress(count) as progress:
        return replicated(_settings(options), limits, count, options.ray_address, name, progress, *_shared(options))


def answer(options: Namespace, name: str, source: BinaryIO, answers: Answers) -> None:
    """Answer the lines of a batch, on Ray Data. Raises TriforceError."""
    with _importing(options):
        from triforce.replicas import ray_data

    ray_data.answer(_settings(options), name, wanted(options), options.ray_address, source, answers, *_shared(options))


def _shared(options: Namespace) -> tuple[int, bool]:
    """How many ranks each replica has, and whether their sums are exact."""
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
    return given


class _Progress:
    """A bar on stderr, on terminals only; what Ray has to say is printed anywhere, once."""

    def __init__(self, count: int) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(desc="replicas", total=count, leave=False, disable=None, file=sys.stderr)
        self._said = ""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, running: int, message: str) -> None:
        self._bar.update(running - self._bar.n)
        if message not in ("", self._said):
            self._bar.clear()
            print(message, file=sys.stderr, flush=True)
        self._said = message
