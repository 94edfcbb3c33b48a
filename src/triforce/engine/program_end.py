"""The end of the program: native work ends between two steps, before the interpreter clears the modules of torch.

Without this, the process would abort in two cases while modules are cleared. A suspended generator would free its KV
with a torch that is partly cleared. A daemon thread would return from native code into an interpreter that has ended.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from threading import Condition
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

MAX_WAIT_SECONDS = 60.0
"""Seconds that the end of the program waits for native work of daemon threads."""


class _Work:
    """Native work of this process. ended: no further work may begin. count: pieces of work in progress."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.ended = False
        self.count = 0


_WORK = _Work()
_RUNS: WeakSet[EndingGenerator[Any]] = WeakSet()


@contextmanager
def native_work() -> Iterator[None]:
    """Make the end of the program wait for this block, or for a function that this decorates.

    Raises SystemExit if the program has ended: that ends a thread silently.
    """
    with _WORK.changed:
        if _WORK.ended:
            raise SystemExit
        _WORK.count += 1
    try:
        yield
    finally:
        with _WORK.changed:
            _WORK.count -= 1
            _WORK.changed.notify_all()


class EndingGenerator(Iterator[T]):
    """A generator whose steps are native work. The end of the program closes it while it is suspended."""

    def __init__(self, steps: Generator[T, None, None]) -> None:
        self.steps = steps
        _RUNS.add(self)

    def __next__(self) -> T:
        with native_work():
            return next(self.steps)

    def __del__(self) -> None:
        with suppress(SystemExit), native_work():
            self.steps.close()


def _end() -> None:
    with _WORK.changed:
        _WORK.ended = True
        _WORK.changed.wait_for(lambda: _WORK.count <= 0, MAX_WAIT_SECONDS)
    for run in list(_RUNS):
        with suppress(ValueError):  # its thread is still in a step
            run.steps.close()


atexit.register(_end)
os.register_at_fork(after_in_child=_WORK.__init__)  # type: ignore[misc]  # the parent's threads do not exist here
