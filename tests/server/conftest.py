"""A tiny pair that chats, and the application in front of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, whose tokenizer has a chat template, and a tiny draft."""
    from asking import TEMPLATE
    from tiny_checkpoint import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), positions=2048, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def llm(pair: Path) -> object:
    from triforce.llm import LLM

    return LLM(pair / "target", pair / "draft", budget=64)


@pytest.fixture(scope="session")
def app(llm: object) -> Iterator[object]:
    from triforce.server.app import create_app
    from triforce.server.limits import Limits
    from triforce.server.worker import Worker

    engine = Worker(llm, Limits(waiting=8))  # type: ignore[arg-type]
    yield create_app(llm, engine, "tiny")  # type: ignore[arg-type]
    asyncio.run(engine.close())
