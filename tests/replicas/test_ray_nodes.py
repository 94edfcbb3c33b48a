"""A replica on each of two nodes: the text of one process, documents at home, and nothing but loopback."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import psutil
import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, events, good, hang_up, refused
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.replicas import remote_engine
from triforce.server.engine_client import GenerationRequest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPT = "the cat sat on the mat"
DOCUMENT = [2 + i % 290 for i in range(remote_engine.MIN_PREFIX_TOKENS + 40)]


def test_ray_stream_equals_one_process(app: ASGIApp, llm: LLM) -> None:
    text = llm.generate(PROMPT, SamplingParams(**SAMPLED))[0].outputs[0].text  # type: ignore[arg-type]
    body = {"prompt": PROMPT, **SAMPLED}
    assert good(ask(app, "/v1/completions", body))["choices"][0]["text"] == text
    pieces = events(ask(app, "/v1/completions", body | {"stream": True}))
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text and len(pieces) > 2


def test_ray_refusals_equal_one_process(app: ASGIApp) -> None:
    assert "max_tokens" in refused(ask(app, "/v1/completions", {"prompt": "a", "max_tokens": -1}))
    assert "tokens" in refused(ask(app, "/v1/completions", {"prompt": [7] * 3000}))
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    assert "no such type" in refused(ask(app, "/v1/completions", {"prompt": "a", "response_format": wrong}))


async def whole(answer: Any) -> RequestOutput:
    *_, end = [event async for event in answer]
    assert isinstance(end, RequestOutput)
    return end


def homes(engine: Any) -> list[set[str]]:
    """Where the questions about eight documents went, one after the other."""
    documents = [[*DOCUMENT[i:], *DOCUMENT[:i]] for i in range(1, 9)]

    async def questions(document: list[int]) -> set[str]:
        names = set()
        for question in range(6):
            (answer,) = engine.submit([GenerationRequest([*document, 5 + question], SamplingParams(max_tokens=1))])
            await whole(answer)
            names.add(answer.message.replica)
        return names

    async def play() -> list[set[str]]:
        return [await questions(document) for document in documents]

    return asyncio.run(play())


def test_ray_document_stays_with_replica(served: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(len(names) == 1 for names in homes(served[1]))
    # Ray copies the class with all that it refers to, and replaces the original by the copy.
    monkeypatch.setitem(remote_engine.PrefixRouter.choose_replicas.__globals__, "MIN_PREFIX_TOKENS", 1 << 20)
    assert any(len(names) == 2 for names in homes(served[1])), "without its law the router was to be found out"


def test_ray_requests_spread_over_replicas(served: tuple[Any, Any]) -> None:
    """Eight texts of nothing in common, at once: neither replica has them all."""
    _, engine = served

    async def play() -> Counter[str]:
        asks = [GenerationRequest([9 + i, 8, 7], SamplingParams(max_tokens=200, ignore_eos=True)) for i in range(8)]
        answers = engine.submit(asks)
        await asyncio.gather(*map(whole, answers))
        return Counter(answer.message.replica for answer in answers)

    went = sum((asyncio.run(play()) for _ in range(4)), Counter())
    assert len(went) == 2 and min(went.values()) >= 8, went


def test_ray_disconnect_cancels_on_replica(app: ASGIApp, served: tuple[Any, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "n": 4, "ignore_eos": True, "stream": True}
    asyncio.run(hang_up(app, "/v1/completions", body, after=3))
    _, engine = served

    async def held() -> int:
        """KV on both replicas, as the words of one short text on each tell it."""
        tokens: dict[str, int] = {}
        while len(tokens) < 2:
            (answer,) = engine.submit([GenerationRequest([3], SamplingParams(max_tokens=1))])
            await whole(answer)
            tokens[answer.message.replica] = answer.message.kv_tokens
        return sum(tokens.values())

    for _ in range(10):  # far less than those texts would take, which leave rows to others
        if not asyncio.run(held()):
            return
    raise AssertionError("KV of abandoned texts is held")


def test_ray_listens_on_loopback_only(served: tuple[Any, Any]) -> None:
    """Sockets of this process and its children, the replicas included."""
    children = psutil.Process().children(recursive=True)
    assert any("ServeReplica" in " ".join(child.cmdline()) for child in children)
    sockets = [c for p in [psutil.Process(), *children] for c in p.net_connections("inet") if c.status == "LISTEN"]
    open_to_all = [c.laddr for c in sockets if c.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")]
    assert sockets and not open_to_all
