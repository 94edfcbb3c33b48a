"""Requests that come and go, told to all ranks: each makes the text of one process, whoever joins, leaves or fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.backends import native_loader
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine import engine_core as engine_module
from triforce.engine.output_stream import OutputChunk
from triforce.errors import CacheError, RankError, RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.server import engine_thread as worker
from triforce.server import tp_mirror as crew
from triforce.server.engine_client import GenerationRequest, ReplicaLost
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.tp_mirror import StepCommands, TPMirror

NATIVE = pytest.mark.skipif(native_loader.native is None, reason="the native kernels were not built")
LIMITS = Limits(waiting=16, rows=4, kv_tokens=1024)
SCHEMA = Grammar.json({"type": "object", "properties": {"a": {"enum": ["the cat", "a hat"]}}, "required": ["a"]})

Scene = Callable[[Worker], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 512)


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[TPMirror]:
    """All that are made."""
    made: list[TPMirror] = []

    class Known(TPMirror):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    for module in (crew, worker):
        monkeypatch.setattr(module, "TPMirror", Known)
    return made


def prompt(step: int, length: int = 120) -> list[int]:
    return [2 + (7 * i * i + step) % 290 for i in range(length)]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True} | changes))


def play(pair: Path, ranks: TPGroup, scene: Scene, change: Callable[[LLM], object] = lambda llm: None) -> Any:
    """A scene in front of rank 0's worker, whom the others follow; what came of it, of them None."""
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64, searched_layers="none", ranks=ranks)
    change(llm)
    if ranks.rank:
        return crew.follow(llm, LIMITS)

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
    return [(each.text, each.token_ids, each.finish_reason) for each in output.outputs]


def held(crew: TPMirror) -> int:
    """Pages that rows have."""
    engine = crew.texts.engine
    return engine.store.pages - engine.store.pool.free_pages - len(engine._prefixes)


def busy(stop: str) -> Scene:
    """All kinds at once: more than there are rows; one is given up in the middle, and others come then."""

    async def scene(worker: Worker) -> list[Any]:
        (left,) = worker.submit([GenerationRequest(prompt(1), params(max_tokens=300), "triforce")])
        first = asyncio.gather(
            *map(
                result,
                worker.submit(
                    [
                        GenerationRequest(prompt(2), params(max_tokens=40, stop=stop), "triforce"),
                        GenerationRequest(prompt(3, 60), params(n=2, temperature=0), "ar"),
                        GenerationRequest(prompt(4, 90), params(), "auto"),
                    ]
                ),
            )
        )
        events = aiter(left)
        for _ in range(3):
            assert isinstance(await anext(events), OutputChunk)
        left.cancel()
        late = await results(
            worker,
            GenerationRequest(prompt(5, 30), params(grammar=SCHEMA, ignore_eos=False, max_tokens=80), "triforce"),
            GenerationRequest(prompt(2), params(n=5, seed=6), "draft-ngram"),
            GenerationRequest(prompt(6), params(max_tokens=5000), "ar", "of another key"),
            GenerationRequest(prompt(2), params(logprobs=1), "retrieval"),
        )
        return [*await first, *late]

    return scene


@NATIVE
def test_requests_get_the_text_of_one_process(pair: Path, crews: list[TPMirror]) -> None:
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64, searched_layers="none")
    whole = llm.generate(prompt(2), params(max_tokens=40), mode="ar")[0].outputs[0].text
    scene = busy(whole[20:23])
    wanted = play(pair, ALONE, scene)
    assert wanted[0].outputs[0].finish_reason == "stop" and len(wanted[0].outputs[0].text) <= 20
    assert json.loads(wanted[3].outputs[0].text)["a"] in ("the cat", "a hat")
    got, _ = together(2, lambda ranks: play(pair, ranks, scene))
    for mine, theirs in zip(got, wanted, strict=True):
        assert texts(mine) == texts(theirs)
    assert got[-1].outputs[0].logprobs == wanted[-1].outputs[0].logprobs
    assert [held(each) for each in crews] == [0, 0, 0]


def test_a_seed_that_is_drawn_is_told(pair: Path) -> None:
    ask = GenerationRequest(prompt(1), params(seed=None, temperature=1.2), "triforce")
    output, again = together(2, lambda ranks: play(pair, ranks, lambda worker: results(worker, ask, ask)))[0]
    assert output.outputs[0].seed != again.outputs[0].seed and texts(output) != texts(again)


@pytest.mark.parametrize("deaf", ["gone", "fresh"])
def test_a_rank_that_does_not_listen_is_noticed(pair: Path, monkeypatch: pytest.MonkeyPatch, deaf: str) -> None:
    """Negative control: one is not told who has gone, or begins what comes in another order."""
    apply = TPMirror.apply

    def disobey(self: TPMirror, orders: StepCommands) -> list[Any]:
        if self._llm.ranks.rank:
            gone, fresh = ([], orders.fresh) if deaf == "gone" else (orders.gone, orders.fresh[::-1])
            orders = StepCommands(gone, fresh)
        return apply(self, orders)

    monkeypatch.setattr(TPMirror, "apply", disobey)

    async def scene(worker: Worker) -> None:
        left, _ = worker.submit(
            [
                GenerationRequest(prompt(1), params(max_tokens=200), "ar"),
                GenerationRequest(prompt(2, 60), params(), "ar"),
            ]
        )
        events = aiter(left)
        for _ in range(3):
            await anext(events)
        left.cancel()
        for output in await results(worker, GenerationRequest(prompt(3), params(), "ar")):
            if isinstance(output, Exception):
                raise output

    with pytest.raises((RankError, ReplicaLost, AssertionError, RuntimeError)):
        together(2, lambda ranks: play(pair, ranks, scene))


def test_what_one_rank_cannot_begin_none_does(
    pair: Path, monkeypatch: pytest.MonkeyPatch, crews: list[TPMirror]
) -> None:
    """A grammar that the second cannot compile; KV that it has no room for. And what no rank has room for."""
    batch = engine_module.Batch

    def full(models: Any, *arguments: Any) -> Any:
        if models.target.ranks.rank and arguments[3][0].prompt == prompt(7):
            raise CacheError("the disk is full")
        return batch(models, *arguments)

    def second(llm: LLM) -> None:
        if llm.ranks.rank:
            llm._grammars = None

    monkeypatch.setattr(engine_module, "Batch", full)

    async def scene(worker: Worker) -> list[Any]:
        return await results(
            worker,
            GenerationRequest(prompt(1), params(), "triforce"),
            GenerationRequest(prompt(2), params(grammar=SCHEMA, ignore_eos=False), "triforce"),
            GenerationRequest(prompt(7), params(), "triforce"),
            GenerationRequest(prompt(3, 400), params(n=8, max_tokens=100), "ar"),
            GenerationRequest(prompt(4), params(), "ar"),
        )

    outputs, _ = together(2, lambda ranks: play(pair, ranks, scene, second))
    assert [type(each) for each in outputs] == [RequestOutput, RequestError, CacheError, CacheError, RequestOutput]
    assert "cannot serve this" in str(outputs[1]) and "no room" in str(outputs[2])
    assert [held(each) for each in crews] == [0, 0]


def test_a_rank_that_breaks_ends_the_engine(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process it would be the rows of that pass; but here the other one waits in it."""
    step, told = engine_module.Batch.step, []

    def breaking(self: Any) -> list[int]:
        if self.target.ranks.rank and len(self.jobs[0].tokens) > 5:
            raise MemoryError
        return step(self)

    monkeypatch.setattr(engine_module.Batch, "step", breaking)

    async def scene(worker: Worker) -> None:
        told.extend(
            await results(
                worker, GenerationRequest(prompt(1), params(), "ar"), GenerationRequest(prompt(2), params(), "triforce")
            )
        )
        told.extend([worker.failure, worker.alive])

    with pytest.raises(MemoryError):
        together(2, lambda ranks: play(pair, ranks, scene))
    *answers, failure, alive = told
    assert [type(each) for each in answers] == [ReplicaLost, ReplicaLost] and failure and not alive


def test_limits_that_differ_are_noticed(pair: Path) -> None:
    with pytest.raises(RankError, match="limits differ"):
        together(2, lambda ranks: LLM(pair / "target", pair / "draft", ranks=ranks).open(4 + ranks.rank))
