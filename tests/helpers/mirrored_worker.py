"""A worker whose steps other ranks mirror, and scenes of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.backends import dispatch
from triforce.distributed.group import TPGroup
from triforce.errors import CacheError, RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.server import engine_thread as mirror
from triforce.server import engine_thread as worker
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import TPMirror, Worker
from triforce.server.errors import ReplicaLost
from triforce.server.limits import Limits

NATIVE = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
LIMITS = Limits(waiting=16, rows=4, kv_tokens=1024)
SCHEMA = Grammar.json({"type": "object", "properties": {"a": {"enum": ["the cat", "a hat"]}}, "required": ["a"]})
Scene = Callable[[Worker], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 512)


@pytest.fixture
def mirrors(monkeypatch: pytest.MonkeyPatch) -> list[TPMirror]:
    """Return the list of all mirrors that are created."""
    created: list[TPMirror] = []

    class Known(TPMirror):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            created.append(self)

    for module in (mirror, worker):
        monkeypatch.setattr(module, "TPMirror", Known)
    return created


def prompt(step: int, length: int = 120) -> list[int]:
    return [2 + (7 * i * i + step) % 290 for i in range(length)]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True} | changes))


def play(pair: Path, ranks: TPGroup, scene: Scene, change: Callable[[LLM], object] = lambda llm: None) -> Any:
    """Run a scene on rank 0's worker, which other ranks follow; return its result, None on the others."""
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64, searched_layers="none", ranks=ranks)
    change(llm)
    if ranks.rank:
        return mirror.follow(llm, LIMITS)

    async def whole() -> Any:
        worker = Worker(llm, LIMITS)
        try:
            return await scene(worker)
        finally:
            await worker.close()
            assert not worker.load().kv_tokens or worker.failure

    return asyncio.run(whole())


async def result(answer: Any) -> RequestOutput | Exception:
    try:
        return [event async for event in answer][-1]
    except (RequestError, CacheError, ReplicaLost) as error:
        return error


async def results(worker: Worker, *asks: GenerationRequest) -> list[Any]:
    return list(await asyncio.gather(*map(result, worker.submit(list(asks)))))


def texts(output: RequestOutput) -> list[tuple[str, list[int], str]]:
    return [(completion.text, completion.token_ids, completion.finish_reason) for completion in output.outputs]


def held(mirror: TPMirror) -> int:
    """Return the number of pages that rows hold."""
    engine = mirror.texts.core
    return engine.store.pages - engine.store.pool.free_pages - len(engine.prefixes.pages)
