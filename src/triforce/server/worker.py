"""An engine of one thread: requests run one after the other, first come first served, on `LLM.stream`."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from time import perf_counter

from triforce.completion import Piece
from triforce.llm import LLM
from triforce.request import RequestOutput
from triforce.server.engine import Ask, Event, Load, QueueFull, Stopping


class _Cancelled(BaseException):
    """Leaves a prefill in the middle. Not an Exception, so that nothing on the way takes it for a failure."""


class _Answer:
    """Events cross from the worker's thread to the event loop that asked for them."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.waited: float | None = None
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._asked = perf_counter()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, RequestOutput):
                return

    def cancel(self) -> None:
        self.cancelled = True

    def begin(self) -> None:
        self.waited = perf_counter() - self._asked

    def tell(self, event: Event | BaseException) -> None:
        """Hand over an event, from any thread. One that was cancelled is not listened to, and its loop may be gone."""
        if not self.cancelled:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """The engine (see `server.engine`). `most_waiting` bounds the queue, what runs not counted."""

    def __init__(self, llm: LLM, most_waiting: int) -> None:
        self._llm, self._most_waiting = llm, most_waiting
        self._waiting: deque[_Answer] = deque()
        self._running: _Answer | None = None
        self._kv_tokens = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="triforce-worker", daemon=True)
        self._thread.start()

    def submit(self, asks: list[Ask]) -> list[_Answer]:
        with self._changed:
            if not self._open:
                raise Stopping
            self._drop_cancelled()
            room = self._most_waiting + (self._running is None and not self._waiting)
            if len(self._waiting) + len(asks) > room:
                raise QueueFull(len(self._waiting))
            answers = [_Answer(ask) for ask in asks]
            self._waiting.extend(answers)
            self._changed.notify()
        return answers

    def load(self) -> Load:
        with self._changed:
            self._drop_cancelled()
            return Load(int(self._running is not None), len(self._waiting), self._kv_tokens)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def drain(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()

    def stop(self) -> None:
        self.drain()
        with self._changed:
            ended = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
        for answer in ended:
            answer.tell(Stopping())
            answer.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.to_thread(self._thread.join)

    def _drop_cancelled(self) -> None:
        for answer in [answer for answer in self._waiting if answer.cancelled]:
            self._waiting.remove(answer)

    def _work(self) -> None:
        while answer := self._next():
            try:
                self._run(answer)
            except _Cancelled:
                pass
            except BaseException as error:  # whoever asked must hear of it, and the next request may go well
                answer.tell(error)
            with self._changed:
                self._running, self._kv_tokens = None, 0

    def _next(self) -> _Answer | None:
        """The next answer to make; None when no more will come."""
        with self._changed:
            while True:
                self._drop_cancelled()
                if self._waiting:
                    self._running = self._waiting.popleft()
                    self._running.begin()
                    return self._running
                if not self._open:
                    return None
                self._changed.wait()

    def _run(self, answer: _Answer) -> None:
        def on_prefill(seen: int, total: int) -> None:
            self._kv_tokens = seen
            if answer.cancelled:
                raise _Cancelled

        events = self._llm.stream(answer.ask.prompt, answer.ask.params, mode=answer.ask.mode, on_prefill=on_prefill)
        try:
            for event in events:
                if answer.cancelled:
                    return
                if isinstance(event, Piece):
                    self._kv_tokens += len(event.token_ids)
                answer.tell(event)
        finally:
            events.close()  # the KV goes now, not when the collector comes by
