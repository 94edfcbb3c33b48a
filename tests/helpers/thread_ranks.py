"""Ranks without processes: each is a thread, and they exchange values through a list."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from triforce.distributed.group import TPGroup
from triforce.errors import RankError

T = TypeVar("T")
PATIENCE = 60  # seconds; only a failing test waits so long


class Threads(TPGroup):
    """A rank that is a thread. `exact`: as in `TPGroup`."""

    def __init__(self, rank: int, brought: list[Any], barrier: threading.Barrier, exact: bool) -> None:
        self.rank = rank
        self.count = len(brought)
        self.exact = exact
        self._brought = brought
        self._barrier = barrier

    def gather(self, some_NX: Tensor, width: int) -> Tensor:
        whole_NX = torch.cat(self._all("gather", some_NX.clone()), 1)
        assert whole_NX.shape == (len(some_NX), width)
        return whole_NX

    def add(self, x_NX: Tensor) -> Tensor:
        return torch.stack(self._all("add", x_NX.clone())).sum(0)

    def broadcast(self, value: T) -> T:
        root_value = self._all("broadcast", None if self.rank else pickle.dumps(value))[0]
        return pickle.loads(root_value) if self.rank else value  # no other rank has rank 0's objects

    def all_true(self, value: bool) -> bool:
        return all(self._all("all_true", value))

    def compare(self, number: int, what: str) -> None:
        if len(set(self._all("compare", number))) > 1:
            raise RankError(f"{what} differs")

    def barrier(self) -> None:
        self._all("barrier", None)

    def _all(self, what: str, mine: Any) -> list[Any]:
        """Return the values of all ranks. Raises RankError if their calls differ, where processes would deadlock."""
        self._brought[self.rank] = what, mine
        self._barrier.wait(PATIENCE)
        everything = list(self._brought)
        self._barrier.wait(PATIENCE)
        if {call for call, _ in everything} != {what}:
            raise RankError(f"ranks do not do the same: {[call for call, _ in everything]}")
        return [value for _, value in everything]


def together(count: int, run: Callable[[TPGroup], T], exact: bool = True) -> list[T]:
    """Return the results of `count` ranks. If some fail, raise the first error that is no consequence of another's."""
    barrier = threading.Barrier(count)
    brought = [None] * count
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = run(Threads(rank, brought, barrier, exact))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
