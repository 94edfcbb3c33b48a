"""The end of an LLM: it is closed, or its process is forked, and from then on each use says so in one line."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakSet

from triforce.engine.model_loader import trim_heap
from triforce.engine.request_runner import RequestRunner
from triforce.errors import RequestError

CLOSED = "this LLM is closed; make another LLM"
FORKED = (
    "this LLM was made before the fork, which copies none of its threads; make another LLM in this process, or start "
    "processes with multiprocessing's spawn"
)


class LLMLifetime:
    """The life of an LLM. Behind its end every attribute that it had but `close` raises RequestError."""

    runner: RequestRunner

    def __init__(self) -> None:
        _LIVING.add(self)

    def __del__(self) -> None:
        self.__dict__.clear()
        trim_heap()

    def close(self) -> None:
        """Give back weights, KV and the disk cache, once what is queued for it is written. Harmless a second time.

        Texts that are being streamed end with RequestError, as all later calls do. `with LLM(...) as llm:` closes at
        its end.
        """
        runner = self.__dict__.get("runner")
        self._end(CLOSED)
        if runner:
            runner.close(CLOSED)
        trim_heap()

    def __enter__(self) -> Self:
        if self._over:
            raise RequestError(self._over)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an LLM can be neither copied nor pickled; make another LLM")

    if not TYPE_CHECKING:  # a checker would take every misspelt name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in self.__dict__.get("_lost", ()):
                raise RequestError(self._over)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _over(self) -> str:
        """Reason of the end; empty while it lives."""
        reason: str = self.__dict__.get("_reason", "")
        return reason

    def _end(self, reason: str) -> None:
        if not self._over:
            lost = frozenset(self.__dict__)
            self.__dict__.clear()
            self.__dict__.update(_reason=reason, _lost=lost)


_LIVING: WeakSet[LLMLifetime] = WeakSet()
_INHERITED: list[dict[str, Any]] = []
"""What LLMs of the process that was forked had. It is kept: what is freed would wait for threads that are not here."""


def _end_in_child() -> None:
    for llm in list(_LIVING):
        _INHERITED.append(dict(llm.__dict__))
        if runner := llm.__dict__.get("runner"):
            runner.abandon(FORKED)
        llm._end(FORKED)


os.register_at_fork(after_in_child=_end_in_child)
