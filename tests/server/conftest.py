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
    from tiny_checkpoint import save, tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        sizes = {"vocab_size": 300, "max_position_embeddings": 2048, "num_hidden_layers": layers}
        save(tiny_model(**sizes, eos_token_id=1), folder / name)
        tiny_tokenizer(chat_template=TEMPLATE).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def llm(pair: Path) -> object:
    from triforce.llm import LLM

    return LLM(pair / "target", pair / "draft", budget=64)


@pytest.fixture(scope="session")
def app(llm: object) -> Iterator[object]:
    from triforce.server.app import create_app
    from triforce.server.worker import Worker

    engine = Worker(llm, most_waiting=8)  # type: ignore[arg-type]
    yield create_app(llm, engine, "tiny")  # type: ignore[arg-type]
    asyncio.run(engine.close())
