"""A waiting request that asks for progress is told its place in the queue."""

from __future__ import annotations

import asyncio

from tests.helpers.asgi_client import SAMPLED
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits


def asks(seed: int, tokens: int = 24, progress: bool = True) -> GenerationRequest:
    params = SamplingParams(**SAMPLED | {"seed": seed, "max_tokens": tokens})
    return GenerationRequest([5 + seed] * 40, params, "ar", progress=progress)


def test_queue_place_is_told_until_turn_comes(llm: LLM) -> None:
    async def places() -> list[list[int]]:
        worker = Worker(llm, Limits(rows=1))
        answers = worker.submit([asks(0, 200), asks(1), asks(2, progress=False), asks(3)])
        client_fields = [[event async for event in answer] for answer in answers]
        await worker.close()
        progress = [[event for event in events if isinstance(event, PrefillProgress)] for events in client_fields]
        assert all(not event.queue_place or event.processed == 0 for events in progress for event in events)
        assert all("queue_place" not in event.client_fields() for event in progress[0])
        return [[event.queue_place for event in events if event.queue_place] for events in progress]

    assert asyncio.run(places()) == [[], [1], [], [3, 2, 1]]
