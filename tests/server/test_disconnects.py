"""Clients that hang up leave no KV behind, and what was served is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, good, hang_up
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.speculation import Tier

MOST = 2000
LONG = {"prompt": "the cat", "max_tokens": MOST, "ignore_eos": True, "stream": True}


async def until_idle(worker: Worker) -> None:
    while worker.load().waiting or worker.load().running:
        await asyncio.sleep(0.01)


def held(worker: Worker) -> int:
    """Return the number of pages that rows hold."""
    engine = worker.mirror.engine.core
    return engine.store.pages - engine.store.pool.free_pages - len(engine.prefixes.pages)


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_kv(llm: LLM, after: int, stream: bool) -> None:
    """A client that hangs up before the headers, after them, or in mid-text leaves no KV behind."""
    worker = Worker(llm, Limits(waiting=4))
    app = create_app(llm, worker, "tiny")
    body = LONG | {"stream": stream, "prompt": ["the cat", "the hat"]}
    got = asyncio.run(hang_up(app, "/v1/completions", body, after if stream else 0))
    assert len(got) < MOST  # of two texts: how soon it is noticed depends on the machine's load
    short = good(ask(app, "/v1/completions", {"prompt": "the cat", **SAMPLED}))
    assert short["usage"]["completion_tokens"] == 24
    asyncio.run(until_idle(worker))
    assert held(worker) == 0
    asyncio.run(worker.close())


def test_disconnect_during_prefill_stops_reading(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is gone after the first of four parts of the prompt."""
    prefill = Tier.prefill

    def slowly(*args: Any, **more: Any) -> Iterator[int]:
        for seen in prefill(*args, **more):
            yield seen
            time.sleep(0.5)  # longer than one step reads, or all parts may be over before anybody looks

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
def test_concurrent_requests_keep_seeded_texts(llm: LLM, mode: str) -> None:
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
    """Return each sample of /metrics by its name and its label beside the model."""
    text = ask(app, "/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    told = ("tier", "finished_reason", "dtype")
    return {(s.name, next((s.labels[name] for name in told if name in s.labels), "")): s.value for s in samples}


def test_times_of_prompts_sent_together_are_those_of_their_request(llm: LLM) -> None:
    """Two prompts of one request are timed once each; neither exceeds the request's own time."""
    app = create_app(llm, Worker(llm, Limits(waiting=4)), "tiny")
    began = perf_counter()
    good(ask(app, "/v1/completions", {"prompt": ["the cat", "a hat"], **SAMPLED, "max_tokens": 40}))
    most, seen = perf_counter() - began, sums(app)
    whole = seen["vllm:e2e_request_latency_seconds_sum", ""]
    assert seen["vllm:e2e_request_latency_seconds_count", ""] == 2 and whole <= 2 * most
    decoded = seen["vllm:request_decode_time_seconds_sum", ""]
    assert whole >= decoded and seen["vllm:request_time_per_output_token_seconds_sum", ""] >= decoded / 40
    asyncio.run(app.state.service.engine.close())


def test_metrics_count_requests_and_tokens(llm: LLM) -> None:
    app = create_app(llm, Worker(llm, Limits(waiting=4)), "tiny")
    answer = good(ask(app, "/v1/completions", {"prompt": "the cat", **SAMPLED, "n": 2, "tier_stats": True}))
    asyncio.run(hang_up(app, "/v1/completions", LONG, after=3))
    good(ask(app, "/v1/completions", {"prompt": "x", "max_tokens": 1, "ignore_eos": True}))
    seen, usage = sums(app), answer["usage"]
    assert seen["vllm:generation_tokens_total", ""] == 49
    assert seen["vllm:prompt_tokens_total", ""] == usage["prompt_tokens"] + len(llm.encode("x"))
    assert seen["vllm:request_success_total", "length"] == 3 and seen["triforce:request_cancelled_total", ""] == 1
    assert seen["vllm:num_requests_running", ""] == seen["vllm:num_requests_waiting", ""] == 0
    assert seen["triforce:kv_cache_dtype", llm.target.kv_dtype] == 1
    for tier in usage["tiers"]:
        assert seen["triforce:tier_passes_total", tier["name"]] >= tier["passes"]
    retrieval = usage["tiers"][-2]
    assert seen["vllm:spec_decode_num_draft_tokens_total", ""] >= retrieval["proposed"]
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert seen[f"vllm:{name}_seconds_count", ""] == 2
    asyncio.run(app.state.service.engine.close())
