"""Ranks of a SocketGroup as threads of one process, with real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

from triforce.distributed.socket_group import PATIENCE, SocketGroup

T = TypeVar("T")


def run_ranks(
    count: int,
    url: str,
    run: Callable[[SocketGroup], T],
    patience: float = PATIENCE,
    ranks: Sequence[int] | None = None,
) -> list[T | Exception]:
    """Return the results of ranks that meet at a URL, or their errors. ranks: those of `count` to run; None: all."""

    def one(rank: int) -> T | Exception:
        try:
            group = SocketGroup(rank, count, url, patience=patience)
        except Exception as error:
            return error
        try:
            return run(group)
        except Exception as error:
            return error
        finally:
            group.leave()

    numbers = range(count) if ranks is None else ranks
    results: dict[int, T | Exception] = {}
    # Daemons: a test whose ranks wait for ever ends by its time limit.
    threads = [Thread(target=lambda rank=rank: results.update({rank: one(rank)}), daemon=True) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in numbers]


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
