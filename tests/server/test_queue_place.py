"""A waiting request that asks for progress is told its place in the queue."""

from __future__ import annotations

import asyncio

from tests.helpers.asgi_client import SAMPLED
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits


def requests_of(seed: int, tokens: int = 24, progress: bool = True) -> GenerationRequest:
    params = SamplingParams(**SAMPLED | {"seed": seed, "max_tokens": tokens})
    return GenerationRequest([5 + seed] * 40, params, "ar", progress=progress)


def test_queue_place_is_told_until_turn_comes(llm: LLM) -> None:
    async def places() -> list[list[int]]:
        worker = Worker(llm, Limits(rows=1))
        answers = worker.submit([requests_of(0, 200), requests_of(1), requests_of(2, progress=False), requests_of(3)])
        events_of_each = [[event async for event in answer] for answer in answers]
        await worker.close()
        progress = [[event for event in events if isinstance(event, PrefillProgress)] for events in events_of_each]
        assert all(not event.queue_place or event.processed == 0 for events in progress for event in events)
        assert all("queue_place" not in event.told() for event in progress[0])
        return [[event.queue_place for event in events if event.queue_place] for events in progress]

    assert asyncio.run(places()) == [[], [1], [], [3, 2, 1]]
