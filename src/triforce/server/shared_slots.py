"""SharedSlots: work that grows with somebody's input, a few pieces at a time, in threads.

Keys take turns, so that one with much to do does not keep another waiting, and each has a share of what runs or waits.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from triforce.server.errors import later

T = TypeVar("T")


class SharedSlots:
    """Slots of one kind of work, called `what`. portion: of the processors that it may take, at least one.

    share: pieces of one key that may run or wait at a time. Used from one event loop at a time.
    """

    def __init__(self, what: str, portion: float, share: int) -> None:
        self._what, self._share = what, share
        self._vacant = max(1, int((os.cpu_count() or 1) * portion))
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By key; the key whose turn is next comes first."""

    async def run(self, key: str, work: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        """Return what `work` returns in a thread, once it has a slot. Raises ApiError where the key has its share.

        A thread cannot be stopped: where nobody waits any more `cancel` is called, and the slot is held to the end.
        """
        async with self._slot(key):
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                cancel()
                await asyncio.gather(working, return_exceptions=True)
                raise

    @asynccontextmanager
    async def _slot(self, key: str) -> AsyncIterator[None]:
        if self._counts[key] >= self._share:
            text = f"{self._share} {self._what} of yours are being worked on or wait"
            raise later(429, text, code="share_used_up")
        self._counts[key] += 1
        try:
            await self._enter(key)
            try:
                yield
            finally:
                self._leave()
        finally:
            self._counts -= Counter([key])  # keys without a count are dropped

    async def _enter(self, key: str) -> None:
        if self._vacant:
            self._vacant -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        """Hand the slot to the key whose turn is next."""
        while self._waiting:
            key = next(iter(self._waiting))
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._vacant += 1
