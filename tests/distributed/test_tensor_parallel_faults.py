"""A rank that differs, fails or does not follow is detected. A request that one rank cannot start starts on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mirrored_worker import SCHEMA, held, params, play, prompt, results
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.thread_ranks import together
from triforce.engine import engine_core as engine_module
from triforce.errors import CacheError, RankError, RequestError, TriforceError
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import TPMirror, Worker
from triforce.server.errors import ReplicaLost


@pytest.mark.parametrize("mutant", caught_in("test_rank_mutant_is_noticed"), ids=str)
def test_rank_mutant_is_noticed(pair: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    mutant.apply(monkeypatch)

    async def scene(worker: Worker) -> None:
        cancelled, _ = worker.submit(
            [
                GenerationRequest(prompt(1), params(max_tokens=200), "ar"),
                GenerationRequest(prompt(2, 60), params(), "ar"),
            ]
        )
        events = aiter(cancelled)
        for _ in range(3):
            await anext(events)
        cancelled.cancel()
        for output in await results(worker, GenerationRequest(prompt(3), params(), "ar")):
            if isinstance(output, Exception):
                raise output

    with pytest.raises((AssertionError, ReplicaLost, RuntimeError, TriforceError)):
        together(2, lambda ranks: play(pair, ranks, scene))


def test_request_failing_on_one_rank_starts_on_none(
    pair: Path, monkeypatch: pytest.MonkeyPatch, mirrors: list[TPMirror]
) -> None:
    """The second rank cannot compile a grammar, and has no room for a KV. No rank has room for the last one."""
    batch = engine_module.SequenceBatch

    def full(models: Any, *arguments: Any) -> Any:
        if models.target.ranks.rank and arguments[3][0].prompt == prompt(7):
            raise CacheError("the disk is full")
        return batch(models, *arguments)

    def second(llm: LLM) -> None:
        if llm.ranks.rank:
            llm.grammars = None

    monkeypatch.setattr(engine_module, "SequenceBatch", full)

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
    assert [type(output) for output in outputs] == [RequestOutput, RequestError, CacheError, CacheError, RequestOutput]
    assert "cannot serve this" in str(outputs[1]) and "does not fit" in str(outputs[2])
    assert [held(mirror) for mirror in mirrors] == [0, 0]


def test_rank_failure_ends_engine(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process only the rows of that pass would fail. Here the other rank waits in the pass."""
    step = engine_module.SequenceBatch.step
    observations = []

    def breaking(self: Any) -> list[int]:
        if self.target.ranks.rank and len(self.sequences[0].tokens) > 5:
            raise MemoryError
        return step(self)

    monkeypatch.setattr(engine_module.SequenceBatch, "step", breaking)

    async def scene(worker: Worker) -> None:
        observations.extend(
            await results(
                worker, GenerationRequest(prompt(1), params(), "ar"), GenerationRequest(prompt(2), params(), "triforce")
            )
        )
        observations.extend([worker.failure, worker.alive])

    with pytest.raises(MemoryError):
        together(2, lambda ranks: play(pair, ranks, scene))
    *answers, failure, alive = observations
    assert [type(answer) for answer in answers] == [ReplicaLost, ReplicaLost] and failure and not alive


def test_rank_limits_differing_are_detected(pair: Path) -> None:
    with pytest.raises(RankError, match="limits differ"):
        together(2, lambda ranks: LLM(pair / "target", pair / "draft", ranks=ranks).open(4 + ranks.rank))
