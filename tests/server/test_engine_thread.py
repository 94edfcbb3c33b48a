"""The worker: requests come and go between two steps; who is cancelled leaves at the next, and no KV is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, good, hang_up
from triforce.distributed.group import ALONE
from triforce.engine.output_stream import OutputChunk
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_client import GenerationRequest, QueueFull, ShuttingDown
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.speculation import Tier

LONG = {"prompt": "the cat", "max_tokens": 2000, "ignore_eos": True, "stream": True}


class Req:
    """Three pieces to be made."""

    def __init__(self, first: int) -> None:
        self.first, self.made, self.started = first, 0, None


class Scripted:
    """Stands for a model and its texts. A step, once it is let, makes a piece for each of as many as there are rows."""

    target, ranks = SimpleNamespace(config=SimpleNamespace(context=100)), ALONE

    def __init__(self) -> None:
        self.let, self.log, self.requests, self.engine = threading.Semaphore(0), [], [], self

    def open(self, rows: int, kv_tokens: int, max_itl: float) -> Scripted:
        self.rows = rows
        return self

    @property
    def kv_tokens(self) -> int:
        return sum(1 + one.made for one in self.requests if one.started)

    def request(self, prompt: list[int], params: SamplingParams, mode: str | None, scope: str) -> Req:
        if prompt[0] == 13:
            raise RequestError("unlucky")
        return Req(prompt[0])

    def submit(self, requests: list[Req], on_prefill: object = None) -> None:
        self.requests += requests

    def cancel(self, one: Req) -> None:
        if one in self.requests:
            self.requests.remove(one)
            self.log.append(f"{'done' if one.made == 3 else 'left' if one.started else 'never'} {one.first}")

    def step(self) -> Iterator[tuple[Req, object]]:
        for one in self.requests[: self.rows]:
            if not one.started:
                one.started = perf_counter()
                self.log.append(f"begin {one.first}")
        self.let.acquire()
        for one in self.requests[: self.rows]:
            if one.first == 14:
                raise MemoryError
            yield one, OutputChunk("x", [one.made], ["full"], 0)
            one.made += 1
            if one.made == 3:
                yield one, RequestOutput([one.first], None, [], "ar", "seeded", "bitwise", 0.0, 0.0)

    def close(self) -> None:
        self.requests.clear()


def asks(*first: int) -> list[GenerationRequest]:
    return [GenerationRequest([i, 2, 3], SamplingParams()) for i in first]


async def read(answer: Any) -> int:
    return len([event async for event in answer])


def run(scene: Callable[[Scripted, Worker], Any], waiting: int = 4, rows: int = 1) -> list[str]:
    """Play a scene, and close the worker; what the engine did."""

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


def test_each_gets_its_own_events() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(9)
        answers = [*worker.submit(asks(1, 2)), *worker.submit(asks(3))]
        assert [await read(answer) for answer in reversed(answers)] == [4, 4, 4]
        assert all(answer.waited is not None for answer in answers)

    assert run(scene) == ["begin 1", "done 1", "begin 2", "done 2", "begin 3", "done 3"]


def test_one_joins_those_that_run() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        (one,) = worker.submit(asks(1))
        llm.let.release()
        events = aiter(one)
        await anext(events)
        (two,) = worker.submit(asks(2))
        llm.let.release(5)
        assert await read(two) == 4
        assert worker.load().running == 0

    assert sorted(run(scene, rows=2)[:2]) == ["begin 1", "begin 2"]


def test_a_failure_is_told_and_the_next_one_is_served() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(3)
        unlucky, other = worker.submit(asks(13, 1))
        with pytest.raises(RequestError, match="unlucky"):
            await read(unlucky)
        assert await read(other) == 4

    assert run(scene)[-1] == "done 1"


def test_what_breaks_the_engine_is_told_to_all_and_others_may_come() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        llm.let.release(9)
        for answer in worker.submit(asks(14, 1)):
            with pytest.raises(MemoryError):
                await read(answer)
        (other,) = worker.submit(asks(2))
        assert await read(other) == 4 and worker.alive

    assert run(scene)[-1] == "done 2"


def test_cancelled_ones_are_left_at_the_next_step_or_never_begun() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        one, two, three = worker.submit(asks(1, 2, 3))
        llm.let.release()
        assert isinstance(await anext(aiter(one)), OutputChunk)
        one.cancel()
        two.cancel()
        assert worker.load().waiting == 1
        llm.let.release(9)
        assert await read(three) == 4

    log = run(scene)
    assert [each for each in log if "never" not in each] == ["begin 1", "left 1", "begin 3", "done 3"]


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

    run(scene, waiting=2)


def test_draining_finishes_what_was_taken_and_stopping_ends_it() -> None:
    async def scene(llm: Scripted, worker: Worker) -> None:
        one, two = worker.submit(asks(1, 2))
        worker.drain()
        with pytest.raises(ShuttingDown):
            worker.submit(asks(3))
        llm.let.release(4)
        assert await read(one) == 4
        events = aiter(two)
        assert isinstance(await anext(events), OutputChunk)
        worker.stop()
        with pytest.raises(ShuttingDown):
            while await anext(events):
                pass

    assert run(scene) == ["begin 1", "done 1", "begin 2", "left 2"]


async def until_idle(worker: Worker) -> None:
    while worker.load().waiting or worker.load().running:
        await asyncio.sleep(0.01)


def held(worker: Worker) -> int:
    """Pages that rows have."""
    engine = worker._crew.texts.engine
    return engine.store.pages - engine.store.pool.free_pages - len(engine._prefixes)


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_leaves_no_kv(llm: LLM, after: int, stream: bool) -> None:
    """Before the headers, after them, in the middle of the text."""
    worker = Worker(llm, Limits(waiting=4))
    app = create_app(llm, worker, "tiny")
    body = LONG | {"stream": stream, "prompt": ["the cat", "the hat"]}
    got = asyncio.run(hang_up(app, "/v1/completions", body, after if stream else 0))
    assert len(got) < 60
    short = good(ask(app, "/v1/completions", {"prompt": "the cat", **SAMPLED}))
    assert short["usage"]["completion_tokens"] == 24
    asyncio.run(until_idle(worker))
    assert held(worker) == 0
    asyncio.run(worker.close())


def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is gone after the first of four parts of the prompt."""
    prefill = Tier.prefill

    def slowly(*args: Any, **more: Any) -> Iterator[int]:
        for seen in prefill(*args, **more):
            yield seen
            time.sleep(0.1)  # or all parts may be over before anybody looks

    monkeypatch.setattr(Tier, "prefill", slowly)

    async def scene() -> None:
        worker = Worker(llm, Limits(waiting=1))
        (answer,) = worker.submit([GenerationRequest([5] * 1900, SamplingParams())])
        while answer.waited is None or not (seen := worker.load().kv_tokens):
            await asyncio.sleep(0)
        answer.cancel()
        await until_idle(worker)
        assert seen < 1500 and worker.alive and worker.load().kv_tokens == 0
        assert held(worker) == 0
        await worker.close()

    asyncio.run(scene())


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_many_at_a_time_get_the_text_of_their_seed(llm: LLM, mode: str) -> None:
    prompts = [[5 + i] * (20 * i + 3) for i in range(6)]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)

    async def scene() -> list[list[int]]:
        worker = Worker(llm, Limits())
        answers = worker.submit([GenerationRequest(prompt, params, mode) for prompt in prompts])
        outputs = [[event async for event in answer][-1] for answer in answers]
        await worker.close()
        return [output.outputs[0].token_ids for output in outputs if isinstance(output, RequestOutput)]

    single = [llm.generate(prompt, params, mode="ar")[0].outputs[0].token_ids for prompt in prompts]
    assert asyncio.run(scene()) == single


def sums(app: ASGIApp) -> dict[tuple[str, str], float]:
    """Every sample that /metrics has, by name and by its label beside the model."""
    text = ask(app, "/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, s.labels.get("tier") or s.labels.get("finished_reason") or ""): s.value for s in samples}


def test_what_is_counted(llm: LLM) -> None:
    app = create_app(llm, Worker(llm, Limits(waiting=4)), "tiny")
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
