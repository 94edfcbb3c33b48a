"""A stream without news sends something every few seconds, so that clients and proxies keep the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from tests.helpers.asgi_client import ask
from tests.helpers.idle_writer import IdleWriter
from triforce.server import service
from triforce.server.service import EventStream, Service


async def slow_frames(closed: list[bool], count: int = 2) -> AsyncGenerator[bytes, None]:
    try:
        for i in range(count):
            await asyncio.sleep(0.25)
            yield b"%d" % i
    finally:
        closed.append(True)


def sent_by(stream: EventStream, *, hang_up_after: int | None = None) -> list[bytes]:
    """Return the bodies that a stream sends to a client."""
    bodies: list[bytes] = []
    gone = asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            if len(bodies) == hang_up_after:
                gone.set()

    async def go() -> None:
        await stream({"type": "http"}, receive, send)

    asyncio.run(go())
    return bodies


def test_idle_frames_fill_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "IDLE_SECONDS", 0.1)
    closed: list[bool] = []
    ended: list[bool] = []
    stream = EventStream(slow_frames(closed), IdleWriter(), lambda: ended.append(True), {})
    bodies = sent_by(stream)
    assert [body for body in bodies if body != b"idle"] == [b"0", b"1", b""] and bodies.index(b"0") > 0
    assert closed == ended == [True]


def test_disconnect_in_silence_closes_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "IDLE_SECONDS", 0.05)
    closed: list[bool] = []
    ended: list[bool] = []
    stream = EventStream(slow_frames(closed), IdleWriter(), lambda: ended.append(True), {})
    with pytest.raises(service.ClientDisconnected):
        sent_by(stream, hang_up_after=1)
    assert closed == ended == [True]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "the cat", "max_tokens": 4},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "the cat"}], "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("path", BODIES)
def test_idle_frame_is_comment_event_or_line(app: ASGIApp, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex measures the time between events of responses, and skips comments; lines of JSON have none."""
    events = Service._events

    async def late_events(*arguments: Any) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.25)
        async for event in events(*arguments):
            yield event

    monkeypatch.setattr(Service, "_events", late_events)
    monkeypatch.setattr(service, "IDLE_SECONDS", 0.05)
    response = ask(app, path, BODIES[path] | {"stream": True})
    frames = response.text.split("\n\n")
    if path == "/v1/responses":
        kinds = [json.loads(frame.split("data: ")[1])["type"] for frame in frames if frame]
        assert kinds.count("response.in_progress") > 1 and kinds[-1] in ("response.completed", "response.incomplete")
    elif path == "/v1/messages":
        assert "event: ping\ndata: {" in response.text and frames[-2].startswith("event: message_stop")
    elif path == "/api/chat":
        first_line = json.loads(response.text.splitlines()[0])
        assert first_line["message"] == {"role": "assistant", "content": ""} and not first_line["done"]
        assert response.headers["content-type"] == "application/x-ndjson"
    else:
        assert any(frame.startswith(":") for frame in frames) and frames[-2] == "data: [DONE]"
