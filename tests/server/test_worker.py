"""The worker: first come first served, cancelled at the next step, and no KV left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from asking import SAMPLED, ask, good, hang_up
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from triforce.cache import Pool
from triforce.completion import Piece
from triforce.errors import RequestError
from triforce.llm import LLM
from triforce.request import RequestOutput, SamplingParams
from triforce.server.app import create_app
from triforce.server.engine import Ask, QueueFull, Stopping
from triforce.server.worker import Worker

LONG = {"prompt": "the cat", "max_tokens": 2000, "ignore_eos": True, "stream": True}


class Scripted:
    """Answers with three pieces, each when it is let; notes whose turn it was, and how it ended."""

    def __init__(self) -> None:
        self.let, self.log = threading.Semaphore(0), list[str]()

    def stream(
        self, prompt: list[int], params: SamplingParams, mode: str | None, on_prefill: Callable[[int, int], None]
    ) -> Generator[Piece | RequestOutput, None, None]:
        self.log.append(f"begin {prompt[0]}")
        try:
            on_prefill(len(prompt), len(prompt))
            if prompt[0] == 13:
                raise RequestError("unlucky")
            for i in range(3):
                self.let.acquire()
                yield Piece("x", [i], ["full"], 0)
            yield RequestOutput(prompt, None, [], "ar", "seeded", "bitwise", 0.0, 0.0)
            self.log.append(f"done {prompt[0]}")
        except GeneratorExit:
            self.log.append(f"left {prompt[0]}")
            raise


def asks(*first: int) -> list[Ask]:
    return [Ask([i, 2, 3], SamplingParams()) for i in first]


async def read(answer: Any) -> int:
    return len([event async for event in answer])


def run(scene: Callable[[Scripted, Worker], Any], most_waiting: int = 4) -> list[str]:
    """Play a scene, and close the worker; what the engine did."""

    async def play() -> None:
        llm = Scripted()
        worker = Worker(llm, most_waiting)  # type: ignore[arg-type]
        await scene(llm, worker)
        llm.let.release(100)
        await worker.close()
        assert not worker.alive and worker.load().running == worker.load().waiting == worker.load().kv_tokens == 0
        log.extend(llm.log)

    log: list[str] = []
    asyncio.run(play())
    return log


def test_first_come_first_served() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(9)
        answers = [*worker.submit(asks(1, 2)), *worker.submit(asks(3))]
        assert [await read(answer) for answer in reversed(answers)] == [4, 4, 4]
        assert all(answer.waited is not None for answer in answers)

    assert run(scene) == ["begin 1", "done 1", "begin 2", "done 2", "begin 3", "done 3"]


def test_a_failure_is_told_and_the_next_one_is_served() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(3)
        unlucky, other = worker.submit(asks(13, 1))
        with pytest.raises(RequestError, match="unlucky"):
            await read(unlucky)
        assert await read(other) == 4

    assert run(scene)[-1] == "done 1"


def test_cancelled_ones_are_left_at_the_next_step_or_never_begun() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        one, two, three = worker.submit(asks(1, 2, 3))
        llm.let.release()
        assert isinstance(await anext(aiter(one)), Piece) and worker.load().kv_tokens == 4
        one.cancel()
        two.cancel()
        assert worker.load().waiting == 1
        llm.let.release(9)
        assert await read(three) == 4

    assert run(scene) == ["begin 1", "left 1", "begin 3", "done 3"]


def test_a_queue_takes_all_or_none() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        with pytest.raises(QueueFull):
            worker.submit(asks(1, 2, 3, 4))
        first = worker.submit(asks(1, 2, 3))  # one of them begins at once
        llm.let.release()
        await anext(aiter(first[0]))
        with pytest.raises(QueueFull) as refusal:
            worker.submit(asks(5))
        assert refusal.value.waiting == 2
        first[2].cancel()
        worker.submit(asks(6))

    run(scene, most_waiting=2)


def test_draining_finishes_what_was_taken_and_stopping_ends_it() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        one, two = worker.submit(asks(1, 2))
        worker.drain()
        with pytest.raises(Stopping):
            worker.submit(asks(3))
        llm.let.release(4)
        assert await read(one) == 4
        events = aiter(two)
        assert isinstance(await anext(events), Piece)
        worker.stop()
        with pytest.raises(Stopping):
            while await anext(events):
                pass

    assert run(scene) == ["begin 1", "done 1", "begin 2", "left 2"]


def pools() -> int:
    return sum(type(thing) is Pool for thing in gc.get_objects())


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_no_kv(llm: LLM, after: int, stream: bool) -> None:
    """Before the headers, after them, in the middle of the text; with others waiting behind it."""
    app = create_app(llm, Worker(llm, 4), "tiny")
    gc.collect()
    before = pools()
    gc.disable()  # it must go by itself
    try:
        body = LONG | {"stream": stream, "prompt": ["the cat", "the hat"]}
        got = asyncio.run(hang_up(app, "/v1/completions", body, after if stream else 0))
        assert len(got) < 60
        short = good(ask(app, "/v1/completions", {"prompt": "the cat", **SAMPLED}))
        assert short["usage"]["completion_tokens"] == 24
        asyncio.run(app.state.service.engine.close())
        assert pools() == before
    finally:
        gc.enable()


def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(llm: LLM) -> None:
    """The client is gone after the first of four parts of the prompt."""
    seen: list[int] = []

    class Leaving:
        def stream(self, prompt: list[int], params: SamplingParams, mode: str | None, on_prefill: Any) -> Any:
            def hook(read: int, total: int) -> None:
                seen.append(read)
                answers[0].cancel()
                on_prefill(read, total)

            return llm.stream(prompt, params, mode=mode, on_prefill=hook)

    async def scene() -> None:
        worker = Worker(Leaving(), 1)  # type: ignore[arg-type]
        answers.extend(worker.submit([Ask([5] * 1900, SamplingParams())]))
        while worker.load().waiting or worker.load().running:
            await asyncio.sleep(0.01)
        assert pools() == before and worker.alive
        await worker.close()

    answers: list[Any] = []
    gc.collect()
    before = pools()
    gc.disable()
    try:
        asyncio.run(scene())
    finally:
        gc.enable()
    assert len(seen) == 1 and seen[0] < 1000


def sums(app: ASGIApp) -> dict[tuple[str, str], float]:
    """Every sample that /metrics has, by name and by its label beside the model."""
    text = ask(app, "/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, s.labels.get("tier") or s.labels.get("finished_reason") or ""): s.value for s in samples}


def test_what_is_counted(llm: LLM) -> None:
    app = create_app(llm, Worker(llm, 4), "tiny")
    answer = good(ask(app, "/v1/completions", {"prompt": "the cat", **SAMPLED, "n": 2, "tier_stats": True}))
    asyncio.run(hang_up(app, "/v1/completions", LONG, after=3))
    good(ask(app, "/v1/completions", {"prompt": "x", "max_tokens": 1}))
    seen, usage = sums(app), answer["usage"]
    assert seen["vllm:generation_tokens_total", ""] == 49
    assert seen["vllm:prompt_tokens_total", ""] == usage["prompt_tokens"] + len(llm.encode("x"))
    assert seen["vllm:request_success_total", "length"] == 3 and seen["triforce:request_cancelled_total", ""] == 1
    assert seen["vllm:num_requests_running", ""] == seen["vllm:num_requests_waiting", ""] == 0
    for tier in usage["tiers"]:
        assert seen["triforce:tier_passes_total", tier["name"]] >= tier["passes"]
    retrieval = usage["tiers"][-2]
    assert seen["vllm:spec_decode_num_draft_tokens_total", ""] >= retrieval["proposed"]
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert seen[f"vllm:{name}_seconds_count", ""] == 2
    asyncio.run(app.state.service.engine.close())
