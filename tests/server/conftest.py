"""The application in front of a tiny pair that chats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.helpers import chat_fixtures, guarded_app

pair, llm = chat_fixtures.pair, chat_fixtures.llm  # fixtures
guarded = guarded_app.guarded


@pytest.fixture(scope="session")
def app(llm: object) -> Iterator[object]:
    from triforce.server.app import create_app
    from triforce.server.engine_thread import Worker
    from triforce.server.limits import Limits

    engine = Worker(llm, Limits(waiting=8))  # type: ignore[arg-type]
    yield create_app(llm, engine, "tiny")  # type: ignore[arg-type]
    asyncio.run(engine.close())
