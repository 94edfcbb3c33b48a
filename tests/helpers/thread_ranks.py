"""Ranks without processes: each is a thread, and they exchange values through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from triforce.arrays import Array, dtype_name, float32, on_device_of, rounded, to_host
from triforce.distributed.broadcast_values import dump, load
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

    def gather(self, some_NX: Array, width: int) -> Array:
        parts_NX = self._all("gather", to_host(some_NX).copy())
        require_equal("rows", [(len(part_NX), part_NX.dtype) for part_NX in parts_NX])
        whole_NX = np.concatenate(parts_NX, 1)
        assert whole_NX.shape == (len(some_NX), width)
        return on_device_of(whole_NX, some_NX)

    def add(self, x_NX: Array) -> Array:
        parts_NX = self._all("add", to_host(x_NX).copy())
        require_equal("shapes", [(part_NX.shape, part_NX.dtype) for part_NX in parts_NX])
        sum_NX = reduce(np.add, map(float32, parts_NX))
        return on_device_of(rounded(sum_NX, dtype_name(x_NX)), x_NX)

    def broadcast(self, value: T) -> T:
        root_value = self._all("broadcast", None if self.rank else dump(value))[0]
        return load(root_value) if self.rank else value  # no other rank has rank 0's objects

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
        require_equal("calls", [call for call, _ in everything])
        return [value for _, value in everything]


def require_equal(what: str, values: Sequence[Hashable]) -> None:
    """Raise RankError unless all ranks brought the same: processes would have diverged."""
    if len(set(values)) > 1:
        raise RankError(f"ranks do not do the same, their {what} are {values}")


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
