"""Requests that start and end, broadcast to all ranks: each gives the text of one process."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from tests.helpers.mirrored_worker import (
    NATIVE,
    SCHEMA,
    Scene,
    held,
    params,
    play,
    prompt,
    result,
    results,
    texts,
)
from tests.helpers.thread_ranks import together
from triforce.distributed.group import ALONE
from triforce.engine.engine import OutputChunk
from triforce.interface.grammar import Grammar
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest
from triforce.server.engine_thread import TPMirror, Worker
from triforce.structured_output.compiler import CompiledGrammar


def busy_scene(stop: str) -> Scene:
    """Return a scene of all kinds of requests, more than there are rows: one is cancelled midway, and others follow."""

    async def scene(worker: Worker) -> list[Any]:
        (cancelled,) = worker.submit([GenerationRequest(prompt(1), params(max_tokens=300), "triforce")])
        first_results = asyncio.gather(
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
        events = aiter(cancelled)
        for _ in range(3):
            assert isinstance(await anext(events), OutputChunk)
        cancelled.cancel()
        late_results = await results(
            worker,
            GenerationRequest(prompt(5, 30), params(grammar=SCHEMA, ignore_eos=False, max_tokens=80), "triforce"),
            GenerationRequest(prompt(2), params(n=5, seed=6), "draft-ngram"),
            GenerationRequest(prompt(6), params(max_tokens=5000), "ar", "of another key"),
            GenerationRequest(prompt(2), params(logprobs=1), "retrieval"),
        )
        return [*await first_results, *late_results]

    return scene


@NATIVE
def test_sharded_requests_equal_one_process(pair: Path, mirrors: list[TPMirror]) -> None:
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64, searched_layers="none")
    full_text = llm.generate(prompt(2), params(max_tokens=40), mode="ar")[0].outputs[0].text
    scene = busy_scene(full_text[20:23])
    one_process = play(pair, ALONE, scene)
    assert one_process[0].outputs[0].finish_reason == "stop" and len(one_process[0].outputs[0].text) <= 20
    assert json.loads(one_process[3].outputs[0].text)["a"] in ("the cat", "a hat")
    got, _ = together(2, lambda ranks: play(pair, ranks, scene))
    for mine, theirs in zip(got, one_process, strict=True):
        assert texts(mine) == texts(theirs)
    assert got[-1].outputs[0].logprobs == one_process[-1].outputs[0].logprobs
    assert [held(mirror) for mirror in mirrors] == [0, 0, 0]


def test_drawn_seed_is_shared_by_ranks(pair: Path) -> None:
    ask = GenerationRequest(prompt(1), params(seed=None, temperature=1.2), "triforce")
    output, again = together(2, lambda ranks: play(pair, ranks, lambda worker: results(worker, ask, ask)))[0]
    assert output.outputs[0].seed != again.outputs[0].seed and texts(output) != texts(again)


def test_texts_go_on_while_another_rank_compiles_a_grammar(pair: Path, mirrors: list[TPMirror]) -> None:
    """The grammar is ready on the first rank. Of two requests that wait for the second rank, one is cancelled."""
    compile_started = threading.Event()
    may_go_on = threading.Event()

    def slow(llm: LLM) -> None:
        compile_tried = llm.grammars.compile_tried

        def compile_later(grammar: Grammar) -> CompiledGrammar:
            compile_started.set()
            assert may_go_on.wait(30)
            return compile_tried(grammar)

        if llm.ranks.rank:
            llm.grammars.compile_tried = compile_later  # type: ignore[method-assign]

    async def scene(worker: Worker) -> Any:
        compiled = worker.mirror.llm.grammars.compile(SCHEMA)
        held_to_it = params(grammar=SCHEMA, ignore_eos=False, max_tokens=80)
        ask = GenerationRequest(prompt(5, 30), held_to_it, "triforce", compiled=compiled)
        (running,) = worker.submit([GenerationRequest(prompt(1), params(max_tokens=300), "ar")])
        pieces = aiter(running)
        await anext(pieces)
        cancelled, waiting = worker.submit([ask, ask])
        assert await asyncio.to_thread(compile_started.wait, 30)
        cancelled.cancel()
        for _ in range(40):
            assert isinstance(await anext(pieces), OutputChunk)
        may_go_on.set()
        running.cancel()
        return await result(waiting)

    output, _ = together(2, lambda ranks: play(pair, ranks, scene, slow))
    assert json.loads(output.outputs[0].text)["a"] in ("the cat", "a hat")
    assert [held(mirror) for mirror in mirrors] == [0, 0]
