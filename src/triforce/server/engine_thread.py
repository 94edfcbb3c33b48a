"""An engine on its own thread. Requests are added and removed between two steps of a `TPMirror`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter

from triforce.engine.engine import Event as EngineEvent
from triforce.engine.engine import OutputChunk, Request
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.server.engine_client import EngineLoad, Event, GenerationRequest, PrefillProgress
from triforce.server.errors import QueueFull, ReplicaLost, ShuttingDown
from triforce.server.grammar_queue import GrammarQueue, failed_on_other_rank
from triforce.server.limits import Limits

IDLE_SECONDS = 0.05
"""Seconds that idle ranks wait for a grammar before they receive the next commands."""


@dataclass(frozen=True, slots=True)
class StepCommands:
    """Commands that rank 0 broadcasts before a step. Numbers identify requests."""

    cancelled: list[int]
    """Numbers of requests to cancel."""
    new: list[tuple[int, GenerationRequest]]


class TPMirror:
    """Applies commands to this rank's engine. It uses `rows`, `kv_tokens` and `max_itl` of the limits."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self.llm = llm
        self.engine = llm.open(limits.rows, limits.kv_capacity(llm.target.config.context), max_itl=limits.max_itl)
        self._grammars = GrammarQueue(llm)
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._progress: dict[int, PrefillProgress] = {}  # progress that is not yet reported, by number
        self._places: dict[int, int] = {}
        """Last reported queue position by number, of requests that ask for progress."""

    def apply(self, commands: StepCommands) -> list[tuple[int, EngineEvent | PrefillProgress | Request | None]]:
        """Apply commands and run a step.

        Returns pairs of a number and: None for a cancelled request, the Request for a started one, or an event. A
        raised error concerns the engine, not a single request.
        """
        outcomes: list[tuple[int, EngineEvent | PrefillProgress | Request | None]] = []
        for number in commands.cancelled:
            self._forget(number)
            outcomes.append((number, None))
        for number, generation in commands.new:
            if generation.params.grammar:
                self._grammars.put(number, generation)
            else:
                outcomes.append((number, self._start(number, generation)))
        for number, compiled in self._grammars.take(0 if self._requests else IDLE_SECONDS):
            outcomes.append((number, compiled if isinstance(compiled, Exception) else self._start(number, compiled)))
        events = self.engine.step()
        self._note_places()
        outcomes += self._progress.items()
        self._progress.clear()
        for request, event in events:
            number = self._numbers[request]
            if isinstance(event, Exception | RequestOutput):
                self._forget(number)
            outcomes.append((number, event))
        return outcomes

    def write_behind(self, stop: Callable[[], object]) -> None:
        """Hand pending entries to the disk cache's thread until `stop` returns true."""
        self.engine.core.write_behind(stop)

    def close(self) -> None:
        """Cancel all requests."""
        self.engine.close()
        self._requests.clear()
        self._numbers.clear()
        self._progress.clear()
        self._places.clear()

    def _start(self, number: int, generation: GenerationRequest) -> Request | Exception:
        """Queue a request and return it, or return its error. A request that fails on one rank starts on no rank."""
        request = None
        error = None
        try:
            request = self.llm.request(
                generation.prompt,
                generation.params,
                generation.mode,
                generation.scope,
                generation.compiled,
                generation.token_texts,
            )
        except Exception as reason:
            error = reason
        if not self.llm.ranks.all_true(error is None):
            return error or failed_on_other_rank()
        assert request
        try:
            self.engine.submit(
                [request], on_prefill=partial(self._note_progress, number) if generation.progress else None
            )
        except Exception as reason:
            return reason
        if generation.progress:
            self._places[number] = 0
        self._requests[number] = request
        self._numbers[request] = number
        return request

    def _note_progress(self, number: int, tokens: int, _: int) -> None:
        """Record the prefill progress of a prompt's first choice. Further choices copy its KV.

        The prefill leaves out the last token of the prompt, which is fed with the first proposal. That token counts as
        processed from the start, so the count reaches the total when the prefill ends.
        """
        request = self._requests[number]
        total = len(request.prompt)
        start = request.started or perf_counter()
        processed = min(tokens + 1, total)
        milliseconds = int(1000 * (perf_counter() - start))
        progress = PrefillProgress(total, request.groups[0].cached_prompt_tokens, processed, milliseconds)
        self._progress[number] = progress

    def _note_places(self) -> None:
        """Record the queue positions of waiting requests with progress, where they have changed."""
        if not self._places:
            return
        places = {group: place for place, group in enumerate(self.engine.core.scheduler.waiting, 1)}
        for number, reported_place in self._places.items():
            request = self._requests[number]
            place = places.get(request.groups[0], 0)
            if request.started is None and place != reported_place:
                self._places[number] = place
                self._progress[number] = PrefillProgress(len(request.prompt), 0, 0, 0, place)

    def _forget(self, number: int) -> None:
        self._grammars.cancel(number)
        self._places.pop(number, None)
        request = self._requests.pop(number, None)
        if request:
            del self._numbers[request]
            self.engine.cancel(request)


def follow(llm: LLM, limits: Limits) -> None:
    """Run a rank other than the first until rank 0 ends. Raises RankError."""
    mirror = TPMirror(llm, limits)
    no_commands: StepCommands | None = None
    while commands := llm.ranks.broadcast(no_commands):
        mirror.apply(commands)


FLUSH_SECONDS = 10.0
"""Seconds at shutdown for pending entries to reach the disk cache's thread."""


class _Answer:
    """Carries events from the worker's thread to the event loop that submitted the request."""

    def __init__(self, generation: GenerationRequest, number: int) -> None:
        self.generation = generation
        self.number = number
        self.cancelled = False
        self.sent = False
        """Whether the request was passed to the mirror."""
        self.request: Request | None = None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._submitted = perf_counter()

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
        return None if started is None else started - self._submitted

    def cancel(self) -> None:
        self.cancelled = True

    def put(self, event: Event | BaseException) -> None:
        """Queue an event, from any thread. A cancelled answer drops it, as its event loop may be closed."""
        if not self.cancelled:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class Worker:
    """Runs the engine. It uses `rows`, `waiting` and `kv_tokens` of the limits; other ranks `follow` its commands."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self._ranks = llm.ranks
        self._max_answers = limits.waiting + limits.rows
        self.mirror = TPMirror(llm, limits)
        self._answers: dict[int, _Answer] = {}
        """Unfinished answers by number, oldest first."""
        self._numbers = count()
        self.failure: BaseException | None = None
        self._kv_tokens = 0
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="triforce-worker", daemon=True)
        self._thread.start()

    def submit(self, generations: list[GenerationRequest]) -> list[_Answer]:
        with self._changed:
            if not self._open:
                raise ShuttingDown
            active = [answer for answer in self._answers.values() if not answer.cancelled]
            if len(active) + len(generations) > self._max_answers:
                raise QueueFull(sum(answer.waited is None for answer in active))
            answers = [_Answer(generation, next(self._numbers)) for generation in generations]
            self._answers |= {answer.number: answer for answer in answers}
            self._changed.notify()
        return answers

    def load(self) -> EngineLoad:
        with self._changed:
            answers = self._answers.values()
            running = sum(answer.waited is not None for answer in answers)
            waiting = sum(answer.waited is None and not answer.cancelled for answer in answers)
            return EngineLoad(running, waiting, self._kv_tokens)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def drain(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()

    def stop(self) -> None:
        self.drain()
        with self._changed:
            unfinished = list(self._answers.values())
        for answer in unfinished:
            answer.put(ShuttingDown())
            answer.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        try:
            while answers := self._wait_for_answers():
                self._step(answers)
            self._ranks.broadcast(None)
            deadline = perf_counter() + FLUSH_SECONDS
            self.mirror.write_behind(lambda: perf_counter() > deadline)
        except BaseException as error:
            with self._changed:
                self._open = False
                self.failure = error
                unfinished = list(self._answers)
            for number in unfinished:
                self._end(number, ReplicaLost())

    def _wait_for_answers(self) -> list[_Answer]:
        """Block until there is an unfinished answer. Returns all unfinished answers, or none at shutdown."""
        self.mirror.write_behind(lambda: self._answers or not self._open)
        with self._changed:
            self._changed.wait_for(lambda: self._answers or not self._open)
            return list(self._answers.values())

    def _step(self, answers: list[_Answer]) -> None:
        cancelled = [answer.number for answer in answers if answer.cancelled]
        new_answers = [answer for answer in answers if not (answer.sent or answer.number in cancelled)]
        for answer in new_answers:
            answer.sent = True
        commands = StepCommands(cancelled, [(answer.number, answer.generation) for answer in new_answers])
        try:
            for number, event in self.mirror.apply(self._ranks.broadcast(commands)):
                self._dispatch(number, event)
        except BaseException as error:  # not due to a single request: end all answers; later ones may succeed
            if self._ranks.count > 1:  # other ranks may be in another state
                raise
            self.mirror.close()
            for answer in answers:
                self._end(answer.number, error)
        self._kv_tokens = self.mirror.engine.core.kv_tokens

    def _dispatch(self, number: int, event: Event | Exception | Request | None) -> None:
        if isinstance(event, OutputChunk | PrefillProgress):
            self._answers[number].put(event)
        elif event is None or isinstance(event, RequestOutput | Exception):
            self._end(number, event)
        else:
            self._answers[number].request = event

    def _end(self, number: int, event: RequestOutput | BaseException | None = None) -> None:
        """Remove an answer, then deliver its last event, if any."""
        with self._changed:
            answer = self._answers.pop(number, None)
            self._kv_tokens = self.mirror.engine.core.kv_tokens
        if answer and event is not None:
            answer.put(event)
