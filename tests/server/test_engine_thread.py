"""The worker that runs the engine in a thread: events, failures, the queue, and how it stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from triforce.distributed.group import ALONE
from triforce.engine.engine import OutputChunk
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import Worker
from triforce.server.errors import QueueFull, ShuttingDown
from triforce.server.limits import Limits


class Req:
    """A request for three pieces."""

    def __init__(self, first_token: int) -> None:
        self.first = first_token
        self.made = 0
        self.started = None


class Scripted:
    """A stand-in for a model and its engine. Each permitted step makes a piece for each row."""

    target = SimpleNamespace(config=SimpleNamespace(context=100))
    ranks = ALONE

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.log = []
        self.requests = []
        self.core = self

    def open(self, rows: int, kv_tokens: int, max_itl: float) -> Scripted:
        self.rows = rows
        return self

    @property
    def kv_tokens(self) -> int:
        return sum(1 + request.made for request in self.requests if request.started)

    def request(self, prompt: list[int], params: SamplingParams, mode: None, scope: str, *_: object) -> Req:
        if prompt[0] == 13:
            raise RequestError("unlucky")
        return Req(prompt[0])

    def submit(self, requests: list[Req], on_prefill: object = None) -> None:
        self.requests += requests

    def cancel(self, request: Req) -> None:
        if request in self.requests:
            self.requests.remove(request)
            self.log.append(
                f"{'done' if request.made == 3 else 'left' if request.started else 'never'} {request.first}"
            )

    def step(self) -> Iterator[tuple[Req, object]]:
        for request in self.requests[: self.rows]:
            if not request.started:
                request.started = perf_counter()
                self.log.append(f"begin {request.first}")
        self.let.acquire()
        for request in self.requests[: self.rows]:
            if request.first == 14:
                raise MemoryError
            yield request, OutputChunk("x", [request.made], ["full"], 0)
            request.made += 1
            if request.made == 3:
                yield request, RequestOutput([request.first], None, [], "ar", "seeded", "bitwise", 0.0, 0.0)

    def write_behind(self, stop: Callable[[], object]) -> None:
        """Keep nothing on disk."""

    def close(self) -> None:
        self.requests.clear()


def requests_of(*first_tokens: int) -> list[GenerationRequest]:
    return [GenerationRequest([i, 2, 3], SamplingParams()) for i in first_tokens]


async def read(answer: Any) -> int:
    return len([event async for event in answer])


def run(scene: Callable[[Scripted, Worker], Any], waiting: int = 4, rows: int = 1) -> list[str]:
    """Play a scene, close the worker, and return the engine's log."""

    async def play() -> None:
        llm = Scripted()
        worker = Worker(llm, Limits(waiting=waiting, rows=rows))  # type: ignore[arg-type]
        await scene(llm, worker)
        llm.let.release(100)
        await worker.close()
        assert not worker.alive and worker.load().running == worker.load().waiting == worker.load().kv_tokens == 0
        log.extend(llm.log)

    log: list[str] = []
    asyncio.run(play())
    return log


def test_worker_sends_events_to_their_request() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(9)
        answers = [*worker.submit(requests_of(1, 2)), *worker.submit(requests_of(3))]
        assert [await read(answer) for answer in reversed(answers)] == [4, 4, 4]
        assert all(answer.waited is not None for answer in answers)

    assert run(scene) == ["begin 1", "done 1", "begin 2", "done 2", "begin 3", "done 3"]


def test_worker_adds_requests_while_running() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        (stream,) = worker.submit(requests_of(1))
        llm.let.release()
        events = aiter(stream)
        await anext(events)
        (two,) = worker.submit(requests_of(2))
        llm.let.release(5)
        assert await read(two) == 4
        assert worker.load().running == 0

    assert sorted(run(scene, rows=2)[:2]) == ["begin 1", "begin 2"]


def test_worker_request_failure_leaves_next_served() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(3)
        unlucky, lucky = worker.submit(requests_of(13, 1))
        with pytest.raises(RequestError, match="unlucky"):
            await read(unlucky)
        assert await read(lucky) == 4

    assert run(scene)[-1] == "done 1"


def test_worker_engine_failure_ends_all_and_recovers() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(9)
        for answer in worker.submit(requests_of(14, 1)):
            with pytest.raises(MemoryError):
                await read(answer)
        (recovered,) = worker.submit(requests_of(2))
        assert await read(recovered) == 4 and worker.alive

    assert run(scene)[-1] == "done 2"


def test_worker_cancelled_requests_leave_at_next_step() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        running, two, three = worker.submit(requests_of(1, 2, 3))
        llm.let.release()
        assert isinstance(await anext(aiter(running)), OutputChunk)
        running.cancel()
        two.cancel()
        assert worker.load().waiting == 1
        llm.let.release(9)
        assert await read(three) == 4

    log = run(scene)
    assert [line for line in log if "never" not in line] == ["begin 1", "left 1", "begin 3", "done 3"]


def test_worker_queue_is_atomic() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        with pytest.raises(QueueFull):
            worker.submit(requests_of(1, 2, 3, 4))
        streams = worker.submit(requests_of(1, 2, 3))  # one of them begins at once
        llm.let.release()
        await anext(aiter(streams[0]))
        with pytest.raises(QueueFull) as refusal:
            worker.submit(requests_of(5))
        assert refusal.value.waiting == 2
        streams[2].cancel()
        worker.submit(requests_of(6))

    run(scene, waiting=2)


def test_worker_drain_finishes_and_stop_ends() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        draining, two = worker.submit(requests_of(1, 2))
        worker.drain()
        with pytest.raises(ShuttingDown):
            worker.submit(requests_of(3))
        llm.let.release(4)
        assert await read(draining) == 4
        events = aiter(two)
        assert isinstance(await anext(events), OutputChunk)
        worker.stop()
        with pytest.raises(ShuttingDown):
            while await anext(events):
                pass

    assert run(scene) == ["begin 1", "done 1", "begin 2", "left 2"]
