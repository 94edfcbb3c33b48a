"""An `EngineClient` of all replicas. Requests wait here, so a dead replica loses few."""

from __future__ import annotations

import asyncio
from asyncio import sleep
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from random import sample
from threading import Event as Flag
from threading import Thread
from time import perf_counter
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.replicas.frontend import ReplicaMessage
from triforce.server.engine_client import EngineLoad, Event, GenerationRequest
from triforce.server.errors import QueueFull, ReplicaLost, ShuttingDown

TRIES = 3
"""Maximal number of replicas that one request is sent to. A request is sent again if its replica dies before the first
token. The number is bounded, as the request may be the cause."""
POLL_SECONDS = 2.0
"""Seconds between two counts of the replicas."""


class _Answer:
    """Events of a request. A task receives them from the replica and queues them until they are read."""

    def __init__(self, generation: GenerationRequest, handle: Any, done: Callable[[_Answer], None]) -> None:
        self.generation = generation
        self.waited: float | None = None
        self.message: ReplicaMessage | None = None
        """Latest message of the replica that runs the request; None while it waits for a replica."""
        self._handle = handle
        self._done = done
        self._submitted = perf_counter()
        self.started = False
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.task = asyncio.create_task(self._consume())
        self.task.add_done_callback(lambda _: done(self))  # the task may be cancelled before it starts

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, RequestOutput):
                return

    def cancel(self) -> None:
        self.task.cancel()

    def put(self, event: Event | Exception) -> None:
        self._events.put_nowait(event)

    async def _consume(self) -> None:
        end: Event | Exception
        try:
            end = await self._run_with_retries()
        except Exception as error:
            end = error
        self._done(self)  # removed before the reader gets the last event
        self.put(end)

    async def _run_with_retries(self) -> RequestOutput:
        """Return the last event, after all others are queued. Before the first token a dead replica is replaced."""
        for remaining_tries in reversed(range(TRIES)):
            try:
                return await self._run_on_replica()
            except ReplicaLost:
                if self.started or not remaining_tries:
                    raise
                self.message = self.waited = None
        raise AssertionError("the last try returns or raises")

    async def _run_on_replica(self) -> RequestOutput:
        messages = self._handle.answer.remote(self.generation)
        end = None
        arrival_time = None
        try:
            async for message in messages:
                arrival_time = arrival_time or perf_counter()
                self.message = message
                self.waited = arrival_time - self._submitted + message.waited
                if isinstance(message.event, Exception):
                    raise message.event
                if isinstance(message.event, RequestOutput):
                    end = message.event
                elif message.event is not None:
                    self.started = self.started or isinstance(message.event, OutputChunk)
                    self.put(message.event)
        except (RayTaskError, TaskCancelledError):
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLost from error
        finally:
            if end is None:
                messages.cancel()
        if end is None:
            raise ReplicaLost
        return end


class Replicas:
    """The engine of a server with replicas: it sends each request to one of them.

    handle: Ray Serve's handle for streaming calls. max_requests: prompts that run or wait. running: returns the number
    of running replicas, called from a thread. release: deletes the replicas, and may take long.
    """

    def __init__(self, handle: Any, max_requests: int, running: Callable[[], int], release: Callable[[], None]) -> None:
        self._handle = handle
        self._max_requests = max_requests
        self._running = running
        self._release = release
        self.answers: dict[_Answer, None] = {}
        self._open = True
        self._alive = True
        self._closed = Flag()
        Thread(target=self._poll, name="triforce-replicas", daemon=True).start()

    def submit(self, generations: list[GenerationRequest]) -> Sequence[_Answer]:
        if not self._open:
            raise ShuttingDown
        if len(self.answers) + len(generations) > self._max_requests:
            raise QueueFull(self.load().waiting)
        answers = [_Answer(generation, self._handle, self._remove) for generation in generations]
        self.answers |= dict.fromkeys(answers)
        return answers

    def load(self) -> EngineLoad:
        messages = [answer.message for answer in self.answers if answer.message]
        kv_tokens = {message.replica: message.kv_tokens for message in messages}
        return EngineLoad(len(messages), len(self.answers) - len(messages), sum(kv_tokens.values()))

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def failure(self) -> None:
        """Always None, as Ray restarts dead replicas."""
        return None

    def drain(self) -> None:
        self._open = False

    def stop(self) -> None:
        self.drain()
        for answer in list(self.answers):
            answer.put(ShuttingDown())
            answer.cancel()

    async def close(self) -> None:
        self.stop()
        tasks = [answer.task for answer in self.answers]
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._closed.is_set():
            self._closed.set()
            await asyncio.to_thread(self._release)
            self._alive = False

    def _remove(self, answer: _Answer) -> None:
        self.answers.pop(answer, None)

    def _poll(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                self._alive = self._running() > 0
            except Exception:  # if Ray does not answer, replicas do not either
                self._alive = False


MIN_PREFIX_TOKENS = 512
"""Length of the shortest prefix that routes a request. A shorter one is prefilled quickly on any replica."""
MAX_PREFIXES = 1 << 16
"""Capacity of the table of prefixes, which drops the least recently used."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray publishes no types
    """Routes a request to the replica that last had a prompt with the same prefix.

    The prefixes recorded for a prompt have MIN_PREFIX_TOKENS, twice, four times ... as many tokens. So the longest
    recorded prefix that two prompts share covers at least half of what they share.
    """

    def initialize_state(self) -> None:
        """Initialize the router's state; Ray calls it in place of a constructor."""
        self._replicas_by_prefix: OrderedDict[int, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica that holds the prefix, then all. Ray takes the least busy one with a free slot."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # an immediate retry would be a busy loop
        alive = {replica.replica_id: replica for replica in candidate_replicas}
        prefix_holders = (
            alive.get(self._replicas_by_prefix.get(key)) for key in reversed(prefix_hashes(pending_request))
        )
        prefix_holder = next((replica for replica in prefix_holders if replica), None)
        await sleep(0)  # requests routed earlier are sent first, and so counted
        # Shuffled, as Ray takes the first of equally busy replicas.
        return [[prefix_holder] if prefix_holder else [], sample(candidate_replicas, len(candidate_replicas))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Record that this replica holds the request's prefixes."""
        for key in prefix_hashes(pending_request):
            self._replicas_by_prefix[key] = replica_id
            self._replicas_by_prefix.move_to_end(key)
        while len(self._replicas_by_prefix) > MAX_PREFIXES:
            self._replicas_by_prefix.popitem(last=False)


def prefix_hashes(request: PendingRequest) -> list[int]:
    """Return hashes of the request's prefixes, shortest first. A hash includes the scope."""
    keys = []
    size = MIN_PREFIX_TOKENS
    for generation in request.args:
        while isinstance(generation, GenerationRequest) and size <= len(generation.prompt):
            keys.append(hash((generation.scope, *generation.prompt[:size])))
            size *= 2
    return keys
