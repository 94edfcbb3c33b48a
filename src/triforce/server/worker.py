"""An engine of one thread (see `server.engine`): requests come and go between two steps of `texts.Texts`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from time import perf_counter

from triforce.completion import Piece
from triforce.llm import LLM
from triforce.request import RequestOutput
from triforce.server.engine import Ask, Event, Load, QueueFull, Stopping
from triforce.server.limits import Limits
from triforce.texts import Request


class _Answer:
    """Events cross from the worker's thread to the event loop that asked for them."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.cancelled = False
        self.request: Request | None = None
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

    @property
    def waited(self) -> float | None:
        started = self.request.started if self.request else None
        return None if started is None else started - self._asked

    def cancel(self) -> None:
        self.cancelled = True

    def tell(self, event: Event | BaseException) -> None:
        """Hand over an event, from any thread. One that was cancelled is not listened to, and its loop may be gone."""
        if not self.cancelled:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """Of the limits it keeps `rows`, `waiting` and `kv_tokens`."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self._llm, self._most = llm, limits.waiting + limits.rows
        self._texts = llm.open(limits.rows, limits.room(llm.target.config.context))
        self._answers: list[_Answer] = []
        """All that are not done, in the order in which they came."""
        self._kv_tokens = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="triforce-worker", daemon=True)
        self._thread.start()

    def submit(self, asks: list[Ask]) -> list[_Answer]:
        with self._changed:
            if not self._open:
                raise Stopping
            wanted = [answer for answer in self._answers if not answer.cancelled]
            if len(wanted) + len(asks) > self._most:
                raise QueueFull(sum(answer.waited is None for answer in wanted))
            answers = [_Answer(ask) for ask in asks]
            self._answers.extend(answers)
            self._changed.notify()
        return answers

    def load(self) -> Load:
        with self._changed:
            running = sum(answer.waited is not None for answer in self._answers)
            waiting = sum(answer.waited is None and not answer.cancelled for answer in self._answers)
            return Load(running, waiting, self._kv_tokens)

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
            ended = list(self._answers)
        for answer in ended:
            answer.tell(Stopping())
            answer.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while answers := self._wait():
            try:
                for answer in answers:
                    if answer.cancelled:
                        self._end(answer)
                    elif answer.request is None:
                        self._begin(answer)
                self._step({answer.request: answer for answer in answers if answer.request})
            except BaseException as error:  # no one request's fault: all must hear of it, and those to come may go well
                self._texts.close()
                for answer in set(answers).intersection(self._answers):
                    self._end(answer, error)
            self._kv_tokens = self._texts.engine.kv_tokens

    def _wait(self) -> list[_Answer]:
        """All that there is to go on with, once there is something; nothing when no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers or not self._open)
            return list(self._answers)

    def _begin(self, answer: _Answer) -> None:
        ask = answer.ask
        try:
            answer.request = self._llm.request(ask.prompt, ask.params, ask.mode, ask.scope)
            self._texts.submit([answer.request])
        except Exception as error:
            self._end(answer, error)

    def _step(self, answers: dict[Request, _Answer]) -> None:
        for request, event in self._texts.step():
            if isinstance(event, Piece):
                answers[request].tell(event)
            else:
                self._end(answers[request], event)

    def _end(self, answer: _Answer, event: RequestOutput | BaseException | None = None) -> None:
        """With an event to tell, unless nobody listens. Who hears of it finds it gone."""
        if answer.request:
            self._texts.cancel(answer.request)
        with self._changed:
            self._answers.remove(answer)
            self._kv_tokens = self._texts.engine.kv_tokens
        if event is not None:
            answer.tell(event)
