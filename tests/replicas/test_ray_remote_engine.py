"""The engine client in front of replicas, without a Ray that runs: retries, losses, the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from triforce.engine.engine import OutputChunk
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.replicas import remote_engine
from triforce.replicas.frontend import ReplicaMessage
from triforce.replicas.remote_engine import Replicas
from triforce.server.engine_client import GenerationRequest
from triforce.server.errors import QueueFull, ReplicaLost, ShuttingDown


class Scripted:
    """Stands for Ray's handle. Each call plays the next script; a script is what its replica says, or does."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.calls = 0
        self.cancelled = 0
        self.answer = self

    def remote(self, ask: GenerationRequest) -> Scripted:
        self.calls += 1
        self.script = self.scripts.pop(0)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    async def __aiter__(self) -> AsyncIterator[ReplicaMessage]:
        for event in self.script:
            if event is ...:
                await asyncio.Event().wait()
            if isinstance(event, ActorDiedError):
                raise event
            yield ReplicaMessage("a", 7, event)


DIED, ARRIVED, PIECE = ActorDiedError(), None, OutputChunk("x", [1], ["full"], 0)
WHOLE = RequestOutput([1], None, [], "ar", "seeded", "bitwise", 0.0, 0.0)


def outcome_of(*scripts: list[Any]) -> tuple[Scripted, list[Any]]:
    """Return the handle, and the events of one request, errors included."""

    async def play() -> list[Any]:
        events = []
        (answer,) = front.submit([GenerationRequest([1], SamplingParams())])
        try:
            async for event in answer:
                events.append(event)
        except Exception as error:
            events.append(type(error))
        assert front.load().running == front.load().waiting == front.load().kv_tokens == 0
        await front.close()
        return events

    handle = Scripted(*scripts)
    front = Replicas(handle, 1, lambda: 1, lambda: None)
    return handle, asyncio.run(play())


def test_ray_unstarted_request_moves_to_another_replica() -> None:
    handle, events = outcome_of([ARRIVED, DIED], [DIED], [ARRIVED, PIECE, WHOLE])
    assert events == [PIECE, WHOLE] and handle.calls == 3


def test_ray_started_request_is_lost() -> None:
    handle, events = outcome_of([ARRIVED, PIECE, DIED], [ARRIVED, PIECE, WHOLE])
    assert events == [PIECE, ReplicaLost] and handle.calls == 1, "a text that goes on from another one's beginning"


def test_ray_request_killing_replicas_is_given_up() -> None:
    handle, events = outcome_of(*[[ARRIVED, DIED]] * 9)
    assert events == [ReplicaLost] and handle.calls == remote_engine.TRIES


def test_ray_engine_errors_are_not_retried() -> None:
    handle, events = outcome_of([ARRIVED, RequestError("no")], [ARRIVED, WHOLE])
    assert events == [RequestError] and handle.calls == 1


def test_ray_stream_without_end_is_lost() -> None:
    assert outcome_of([ARRIVED, PIECE])[1] == [PIECE, ReplicaLost]


def scene(act: Callable[[Scripted, Replicas], Any], *scripts: list[Any], max_requests: int = 2) -> Scripted:
    async def play() -> None:
        await act(handle, front)
        await front.close()
        assert front.load().running == front.load().waiting == 0 and not front.alive and left_replicas == [1]

    left_replicas: list[int] = []
    handle = Scripted(*scripts)
    front = Replicas(handle, max_requests, lambda: 1, lambda: left_replicas.append(1))
    asyncio.run(play())
    return handle


def requests_of(count: int) -> list[GenerationRequest]:
    return [GenerationRequest([1], SamplingParams())] * count


def test_ray_queue_is_bounded_and_atomic() -> None:
    async def act(handle: Scripted, front: Replicas) -> None:
        with pytest.raises(QueueFull):
            front.submit(requests_of(3))
        first_stream, _ = front.submit(requests_of(2))
        with pytest.raises(QueueFull) as full:
            front.submit(requests_of(1))
        assert full.value.waiting == 2 and first_stream.waited is None
        first_stream.cancel()  # before it began
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        front.submit(requests_of(1))

    scene(act, [...], [...], [...])


def test_ray_cancel_reaches_replica() -> None:
    async def act(handle: Scripted, front: Replicas) -> None:
        (answer,) = front.submit(requests_of(1))
        assert await anext(aiter(answer)) == PIECE
        assert (front.load().running, front.load().waiting, front.load().kv_tokens) == (1, 0, 7)
        answer.cancel()

    assert scene(act, [ARRIVED, PIECE, ...]).cancelled == 1


def test_ray_shutdown_ends_running_requests() -> None:
    async def act(handle: Scripted, front: Replicas) -> None:
        (answer,) = front.submit(requests_of(1))
        front.drain()
        with pytest.raises(ShuttingDown):
            front.submit(requests_of(1))
        front.stop()
        with pytest.raises(ShuttingDown):
            await anext(aiter(answer))

    scene(act, [ARRIVED, ...])


@pytest.mark.parametrize("running", [lambda: 0, lambda: 1 // 0])
def test_ray_without_replicas_is_unhealthy(monkeypatch: pytest.MonkeyPatch, running: Callable[[], int]) -> None:
    monkeypatch.setattr(remote_engine, "POLL_SECONDS", 0.01)
    front = Replicas(Scripted(), 1, running, lambda: None)
    for _ in range(1000):
        if not front.alive:
            break
        asyncio.run(asyncio.sleep(0.01))
    assert not front.alive
    asyncio.run(front.close())
