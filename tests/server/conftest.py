"""The application in front of a tiny pair that chats."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.server import chatting

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)
pair, llm = chatting.pair, chatting.llm  # fixtures


@pytest.fixture(scope="session")
def app(llm: object) -> Iterator[object]:
    from triforce.server.app import create_app
    from triforce.server.engine_thread import Worker
    from triforce.server.limits import Limits

    engine = Worker(llm, Limits(waiting=8))  # type: ignore[arg-type]
    yield create_app(llm, engine, "tiny")  # type: ignore[arg-type]
    asyncio.run(engine.close())
