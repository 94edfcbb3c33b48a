"""An application that requires API keys, and one that reads whole bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

KEY, OTHER = "a-key-of-many-letters", "another-key-as-long"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[ASGIApp]:
    engine = Worker(llm, Limits(waiting=2))
    yield create_app(llm, engine, "tiny", keys=[KEY, OTHER], hosts=["gpu.example.org"], limits=Limits(body_bytes=2000))
    asyncio.run(engine.close())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def send_to(
    app: ASGIApp, chunks: tuple[bytes, ...] = (b"",), wait: float = 0, headers: Any = (), path: str = "/"
) -> tuple[int, bytes]:
    got: list[Message] = []
    unread = [{"type": "http.request", "body": c, "more_body": i < len(chunks)} for i, c in enumerate(chunks, 1)]

    async def receive() -> Message:
        await asyncio.sleep(wait)
        return unread.pop(0)

    async def send(message: Message) -> None:
        got.append(message)

    asyncio.run(app({"type": "http", "path": path, "headers": headers}, receive, send))
    return got[0]["status"], got[1]["body"]
