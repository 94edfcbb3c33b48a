"""A server of a tiny model with a chat template of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from starlette.types import ASGIApp

from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits


def templated_app(pair: Path, template: str) -> Iterator[ASGIApp]:
    """Yield the server of a pair with this chat template, and close its engine."""
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64)
    assert llm.tokenizer
    llm.tokenizer.templates = {"default": template}
    engine = Worker(llm, Limits(waiting=2))
    yield create_app(llm, engine, "tiny")
    asyncio.run(engine.close())
