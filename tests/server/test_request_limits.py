"""Limits of requests: bytes, KV, time, and the length of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good, hang_up, refused
from tests.helpers.guarded_app import KEY, PATH, echo, send_to
from triforce.engine.engine import OutputChunk
from triforce.llm import LLM
from triforce.server import security
from triforce.server.app import create_app
from triforce.server.engine_client import Event
from triforce.server.engine_thread import Worker
from triforce.server.errors import ApiError
from triforce.server.limits import Limits
from triforce.server.schemas import CompletionBody
from triforce.server.security import BodyLimit

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the cat"}]


def test_body_limit_holds_for_announced_and_chunked() -> None:
    app = BodyLimit(echo, Limits(body_bytes=10))
    assert send_to(app, (b"12345", b"67890")) == (200, b"1234567890")
    assert send_to(app, (b"12345", b"67890", b"1"))[0] == 413
    assert send_to(app, headers=[(b"content-length", b"11")])[0] == 413
    assert send_to(app, headers=[(b"content-length", b"9" * 5000)])[0] == 413


def test_open_routes_limit_bodies_to_1024_bytes(guarded: ASGIApp) -> None:
    for path in security.OPEN_PATHS:
        assert ask(guarded, path, content=b" " * 1024).status_code != 413
        assert "1024 bytes" in refused(ask(guarded, path, content=b" " * 1025), 413)


def test_body_must_arrive_in_time() -> None:
    assert send_to(BodyLimit(echo, Limits(body_seconds=0.05)), wait=0.2)[0] == 408


def test_body_too_large_is_413(guarded: ASGIApp) -> None:
    response = ask(guarded, PATH, {"prompt": "x" * 3000}, headers={"authorization": f"Bearer {KEY}"})
    assert "--max-body" in refused(response, 413)


def test_request_kv_limit_is_enforced(llm: LLM) -> None:
    limits = Limits(kv_tokens=100)
    app = create_app(llm, Worker(llm, limits), "tiny", limits=limits)
    assert "lower n or max_tokens" in refused(ask(app, PATH, {"prompt": [5] * 10, "max_tokens": 41, "n": 2}))
    assert ask(app, PATH, {"prompt": [5] * 10, "max_tokens": 40, "n": 2}).status_code == 200
    for prompt, fields, message, param in (
        (100, {"max_tokens": 1}, "the prompt of 100 tokens", "prompt"),
        (60, {"max_tokens": 41}, "lower max_tokens to 40", "max_tokens"),
        (60, {"max_tokens": 4, "n": 2}, "lower n", "n"),
    ):
        answer = ask(app, PATH, {"prompt": [5] * prompt, **fields})
        assert message in refused(answer) and answer.json()["error"]["param"] == param
    asyncio.run(app.state.service.engine.close())


@pytest.mark.parametrize(("path", "body"), [(PATH, {"prompt": [5] * 93}), (CHAT, {"messages": HELLO})])
def test_limit_that_was_not_sent_is_what_there_is_room_for(llm: LLM, path: str, body: dict[str, Any]) -> None:
    limits = Limits(kv_tokens=100)
    app = create_app(llm, Worker(llm, limits), "tiny", limits=limits)
    answer = good(ask(app, path, body | {"ignore_eos": True}))
    assert answer["usage"]["total_tokens"] == 100 and answer["choices"][0]["finish_reason"] == "length"
    asyncio.run(app.state.service.engine.close())


def test_request_time_limit_ends_generation(llm: LLM) -> None:
    app = create_app(llm, Worker(llm, Limits(waiting=1)), "tiny", limits=Limits(seconds=0.2))
    body = {"prompt": "the cat", "max_tokens": 2000, "ignore_eos": True}
    assert "--timeout" in refused(ask(app, PATH, body), 408)
    asyncio.run(app.state.service.engine.close())


class LateAnswer:
    """A stream of events, each after a time in seconds. waited: as of `GenerationStream`."""

    def __init__(self, waited: float | None, events: Sequence[tuple[float, Event]]) -> None:
        self.waited = waited
        self.events = events

    async def __aiter__(self) -> AsyncIterator[Event]:
        for seconds, event in self.events:
            await asyncio.sleep(seconds)
            yield event

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    ("waited", "stream", "gaps", "is_ended"),
    [
        (None, True, [1.0], True),  # it waits in the queue
        (None, False, [1.0], True),
        (0.0, True, [1.0, 0.01], False),  # its prompt is read
        (0.0, False, [1.0, 0.01], False),
        (0.0, True, [0.01] + [0.15] * 5, False),  # its stream goes on
        (0.0, False, [0.01] + [0.15] * 5, True),
        (0.0, True, [0.01, 1.0], True),  # its stream stands still
    ],
)
def test_time_limit_spares_prompts_and_streams_that_go_on(
    app: ASGIApp, waited: float | None, stream: bool, gaps: list[float], is_ended: bool
) -> None:
    service = replace(app.state.service, limits=Limits(seconds=0.5))  # type: ignore[attr-defined]
    answer = LateAnswer(waited, [(gap, OutputChunk("x", [1], ["full"], 0)) for gap in gaps])
    body = CompletionBody(prompt="the cat", stream=stream)

    async def received() -> int:
        return len([event async for event in service._events([answer], body)])

    if is_ended:
        with pytest.raises(ApiError, match="--timeout"):
            asyncio.run(received())
    else:
        assert asyncio.run(received()) == len(gaps)


def test_full_queue_answers_429_with_retry_after(llm: LLM) -> None:
    """One request runs, one waits, the third gets 429; a cancelled request frees its place."""
    app = create_app(llm, Worker(llm, Limits(waiting=1, rows=1)), "tiny")
    long = {"prompt": "the cat", "max_tokens": 2000, "ignore_eos": True}

    async def three() -> list[int]:
        tasks = [asyncio.create_task(hang_up(app, PATH, long, after=0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        refusal = await hang_up(app, PATH, long, after=2)
        assert (b"retry-after", b"5") in refusal[0]["headers"]
        await asyncio.gather(*tasks)
        return [refusal[0]["status"], (await hang_up(app, PATH, long | {"max_tokens": 2}, after=2))[0]["status"]]

    assert asyncio.run(three()) == [429, 200]
    asyncio.run(app.state.service.engine.close())


def test_more_prompts_than_queue_are_400(llm: LLM) -> None:
    limits = Limits(waiting=1, rows=1)
    app = create_app(llm, Worker(llm, limits), "tiny", limits=limits)
    assert "at most 2" in refused(ask(app, PATH, {"prompt": ["a", "b", "c"], "max_tokens": 1}))
    assert ask(app, PATH, {"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
    asyncio.run(app.state.service.engine.close())
