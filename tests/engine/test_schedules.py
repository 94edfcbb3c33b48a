"""Requests come, end and are cancelled at any step: each text equals that of the same request alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.helpers.engine_scene import KV_TOKENS, ROWS, TOKENS, alone, check_empty, check_same, request
from tests.helpers.tiny_llm import MODES, llm
from triforce.engine.engine import OutputChunk, Request
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM

LENGTHS = [1, 40, 91, 150, 151, 260]


@pytest.fixture(autouse=True, scope="module")
def model(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedules, "model", llm(folder), raising=False)
        patch.setattr(Int8Schedules, "model", llm(folder, kv_dtype="int8"), raising=False)
        yield


class Schedules(RuleBasedStateMachine):
    """Run any sequence of requests, steps, cancellations and swaps.

    No rule has a precondition: the step that ends a text in mode `auto` depends on the clock, and draws may not.
    """

    model: ClassVar[LLM]

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.model.open(ROWS, KV_TOKENS)
        self.running: dict[Request, list[list[int]]] = {}
        self.temperatures: dict[Request, float] = {}

    @rule(
        mode=st.sampled_from(MODES),
        length=st.sampled_from(LENGTHS),
        temperature=st.sampled_from([0.0, 0.8]),
        tokens=st.sampled_from([1, 7, TOKENS]),
        n=st.sampled_from([1, 1, 2]),
        extra=st.sampled_from([{}, {}, dict(logprobs=1), dict(prompt_logprobs=0)]),
        scope=st.sampled_from("aab"),
    )
    def come(
        self, mode: str, length: int, temperature: float, tokens: int, n: int, extra: dict[str, int], scope: str
    ) -> None:
        if len(self.running) == 6:
            return
        new_request = request(self.model, length, mode, scope, temperature=temperature, max_tokens=tokens, n=n, **extra)
        self.engine.submit([new_request])
        self.running[new_request], self.temperatures[new_request] = [[] for _ in range(n)], temperature

    @rule(steps=st.integers(1, 5))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        if not self.running:
            return
        left_request = list(self.running)[which % len(self.running)]
        self.engine.cancel(left_request)
        del self.running[left_request]

    @rule(which=st.integers(0, 5))
    def swap_out(self, which: int) -> None:
        if not self.running:
            return
        swapped_request = list(self.running)[which % len(self.running)]
        for group in swapped_request.groups:
            self.engine.core.swap_out(group)

    def step(self) -> None:
        for stepped_request, event in self.engine.step():
            if isinstance(event, OutputChunk):
                self.running[stepped_request][event.index] += event.token_ids
                continue
            assert isinstance(event, RequestOutput), event
            texts = [output.token_ids for output in event.outputs]
            assert texts == self.running.pop(stepped_request)
            which = (len(stepped_request.prompt), self.temperatures[stepped_request])
            tokens = stepped_request.sequences[0].params.max_tokens
            plain = alone(self.model, *which, tokens=tokens)
            assert texts == [completion.token_ids for completion in plain[: len(texts)]] and len(texts[0]) == tokens
            if stepped_request.mode != "auto":  # its controller observes all rows, and the clock
                check_same(event.outputs, alone(self.model, *which, stepped_request.mode, tokens))
            assert all(len(o.logprobs or o.token_ids) == len(o.token_ids) for o in event.outputs)
            assert len(event.prompt_logprobs or stepped_request.prompt) == len(stepped_request.prompt)

    @invariant()
    def pages_have_the_owners_they_should(self) -> None:
        core = self.engine.core
        batches = [*core.batches.values(), *(task.batch for task in core.prefilling.values())]
        owned_pages = [page for batch in batches for table in batch.top.cache.pool.tables for page in table]
        owned_pages += core.prefixes.pages.values()
        assert core.store.pool.free_pages == core.store.pages - len(set(owned_pages))
        assert all(
            core.store.pool.allocator.refcounts[page] == owned_pages.count(page)
            for page in range(1, core.store.pages + 1)
        )
        for batch in batches:
            for table, length in zip(batch.top.cache.pool.tables, batch.top.cache.lengths_B.tolist(), strict=True):
                assert all(owned_pages.count(page) == 1 for page in table[length // 16 :]), (
                    "a row writes to its own pages only"
                )
        assert sum(len(batch.sequences) for batch in batches) <= core.store.rows
        assert all(sequence.finish_reason is None for batch in batches for sequence in batch.sequences)

    def teardown(self) -> None:
        while self.running and self.engine.busy:
            self.step()
        check_empty(self.engine)


class Int8Schedules(Schedules):
    """Run the schedules over int8 KV, whose rounded rows are shared, copied and swapped in."""


TestSchedules = Schedules.TestCase
TestInt8Schedules = Int8Schedules.TestCase
for case in (TestSchedules, TestInt8Schedules):
    case.settings = settings(max_examples=12, stateful_step_count=16, deadline=None, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [Schedules, Int8Schedules])
def test_random_schedules_keep_each_text(machine: type[Schedules]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=300, stateful_step_count=40, deadline=None))
