"""Requests come, go and are cancelled at any step: the text of each is that of the same request alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parent / "cache"))
from tiny_llm import MODES, ask, checkpoints, counted, ids, llm

from triforce import engine
from triforce.batch import Batch
from triforce.cache import PAGE, full
from triforce.cache.full import TAIL
from triforce.completion import Piece
from triforce.errors import CacheError
from triforce.llm import LLM
from triforce.request import RequestOutput
from triforce.texts import Request, Texts

torch.set_num_threads(1)
LENGTHS = [1, 40, 91, 150, 151, 260]
ROWS, KV_TOKENS, TOKENS = 4, 700, 20
CHUNK, READ = 64, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Here the draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture(autouse=True, scope="module")
def small_chunks(folder: Path) -> Iterator[None]:
    """Prompts are read in several steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "PREFILL_ON_CPU", CHUNK)
        patch.setattr(engine, "READ", READ)
        patch.setattr(Schedules, "model", llm(folder), raising=False)
        yield


def prompt(length: int) -> list[int]:
    """The beginning of one of two texts."""
    return ids(640, seed=length % 2)[:length]


@cache
def alone(model: LLM, length: int, temperature: float, mode: str = "ar") -> RequestOutput:
    """Two choices."""
    params = ask(temperature=temperature, max_tokens=TOKENS, n=2)
    return model.generate(prompt(length), params, mode=mode)[0]


def request(model: LLM, length: int, mode: str | None = None, scope: str = "", **changes: Any) -> Request:
    return model.request(prompt(length), ask(**({"max_tokens": TOKENS} | changes)), mode, scope)


def finish(texts: Texts) -> dict[Request, RequestOutput]:
    outputs = {}
    while texts.busy:
        for one, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[one] = event
    return outputs


def check_empty(texts: Texts) -> None:
    store = texts.engine.store
    assert not texts.engine.groups and texts.engine.kv_tokens == 0
    assert store.pool.free_pages + len(texts.engine._prefixes) == store.pages
    texts.close()
    assert store.pool.free_pages == store.pages
    assert "streaming" not in vars(store) or sorted(store.streaming._free) == list(range(store.rows))


class Schedules(RuleBasedStateMachine):
    """Any sequence of requests, steps and cancellations."""

    model: ClassVar[LLM]

    def __init__(self) -> None:
        super().__init__()
        self.texts = self.model.open(ROWS, KV_TOKENS)
        self.running: dict[Request, list[list[int]]] = {}
        self.temperatures: dict[Request, float] = {}

    @precondition(lambda self: len(self.running) < 6)
    @rule(
        mode=st.sampled_from(MODES),
        length=st.sampled_from(LENGTHS),
        temperature=st.sampled_from([0.0, 0.8]),
        tokens=st.integers(1, TOKENS),
        n=st.sampled_from([1, 1, 2]),
        extra=st.sampled_from([{}, {}, dict(logprobs=1), dict(prompt_logprobs=0)]),
        scope=st.sampled_from("aab"),
    )
    def come(
        self, mode: str, length: int, temperature: float, tokens: int, n: int, extra: dict[str, int], scope: str
    ) -> None:
        one = request(self.model, length, mode, scope, temperature=temperature, max_tokens=tokens, n=n, **extra)
        self.texts.submit([one])
        self.running[one], self.temperatures[one] = [[] for _ in range(n)], temperature

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 5))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        one = list(self.running)[which % len(self.running)]
        self.texts.cancel(one)
        del self.running[one]

    def step(self) -> None:
        for one, event in self.texts.step():
            if isinstance(event, Piece):
                self.running[one][event.index] += event.token_ids
                continue
            assert isinstance(event, RequestOutput), event
            texts = [output.token_ids for output in event.outputs]
            assert texts == self.running.pop(one)
            whole = alone(self.model, len(one.prompt), self.temperatures[one]).outputs
            assert texts == [whole[b].token_ids[: len(text)] for b, text in enumerate(texts)]
            assert all(len(text) == job.params.max_tokens for text, job in zip(texts, one.jobs, strict=True))
            assert all(len(o.logprobs or o.token_ids) == len(o.token_ids) for o in event.outputs)
            assert len(event.prompt_logprobs or one.prompt) == len(one.prompt)

    @invariant()
    def pages_have_the_owners_they_should(self) -> None:
        it = self.texts.engine
        batches = [*it._batches.values(), *([it._reading[1]] if it._reading else [])]
        held = [page for batch in batches for table in batch.top.cache.pool.tables for page in table]
        held += it._prefixes._pages.values()
        assert it.store.pool.free_pages == it.store.pages - len(set(held))
        assert all(it.store.pool.owners(page) == held.count(page) for page in range(1, it.store.pages + 1))
        for batch in batches:
            for table, length in zip(batch.top.cache.pool.tables, batch.top.cache.lengths_B.tolist(), strict=True):
                assert all(held.count(page) == 1 for page in table[length // 16 :]), (
                    "a row writes to its own pages only"
                )
        assert sum(len(batch.jobs) for batch in batches) <= it.store.rows
        assert all(job.finish is None for batch in batches for job in batch.jobs)

    def teardown(self) -> None:
        while self.running:
            self.step()
        check_empty(self.texts)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=12, stateful_step_count=16, deadline=None, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_schedules() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Schedules, settings=settings(max_examples=300, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_a_row_is_what_it_is_alone_under_rejection_too(folder: Path, mode: str) -> None:
    """The law says no more than that its law is the same; but noise and tiers of a row are its own, and so is all."""
    model = llm(folder, coupling="rejection")
    texts = model.open(ROWS, KV_TOKENS)
    texts.submit([request(model, 150, mode, max_tokens=3, seed=3)])
    for _ in range(2):
        list(texts.step())
    late = request(model, 90, mode, temperature=0.8, n=2)
    texts.submit([request(model, 40, mode, max_tokens=9, seed=4)])
    texts.submit([late])
    (output,) = (event for one, event in finish(texts).items() if one is late)
    single = alone(model, 90, 0.8, mode)
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in single.outputs]
    for tier, own in zip(output.outputs[1].tiers, single.outputs[1].tiers, strict=True):
        assert (tier.proposed, tier.accepted, tier.passes) == (own.proposed, own.accepted, own.passes)
    assert output.outputs[1].origins == single.outputs[1].origins


def test_running_texts_do_not_wait_for_a_long_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fed = llm(folder), list[int]()
    texts = model.open(ROWS, 1400)
    short, long = request(model, 40, max_tokens=200), request(model, 501, max_tokens=2)
    texts.submit([short])
    list(texts.step())
    plain = Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: (fed.append(texts.engine.kv_tokens), plain(batch))[1])
    texts.submit([long])
    while long.groups[0] not in texts.engine._groups:
        assert any(one is short for one, _ in texts.step())
    longest = max(b - a for a, b in pairwise(fed))
    assert len(fed) >= 500 // (READ + CHUNK) and longest <= READ + CHUNK + model.speculation.reach
    texts.close()
    check_empty(texts)


def test_first_come_first_served(folder: Path) -> None:
    """One that has room must not overtake one that has not."""
    model = llm(folder)
    texts = model.open(ROWS, KV_TOKENS)
    begun: list[Request] = []
    requests = [request(model, 400, "ar", max_tokens=30), request(model, 501, "ar"), request(model, 1, "retrieval")]
    for one in requests:
        texts.submit([one])
    while texts.busy:
        list(texts.step())
        begun += [one for one in requests if one.started is not None and one not in begun]
        assert requests[1] not in begun or requests[0].done
    assert begun == requests
    check_empty(texts)


@pytest.mark.parametrize("steps", [0, 1, 4, 30])
def test_what_is_cancelled_gives_its_pages_back_at_once(folder: Path, steps: int) -> None:
    model = llm(folder)
    texts = model.open(ROWS, KV_TOKENS)
    one = request(model, 260, "triforce", n=2, max_tokens=100)
    texts.submit([one])
    for _ in range(steps):
        list(texts.step())
    texts.cancel(one)
    check_empty(texts)
    texts.cancel(one)
    assert not texts.busy


def test_a_pass_that_fails_ends_those_who_were_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = llm(folder), Batch.step

    def step(batch: Batch) -> list[int]:
        if len(batch.tiers) > 1 and len(batch.jobs) > 1:
            raise ValueError("broken")
        return plain(batch)

    monkeypatch.setattr(Batch, "step", step)
    texts = model.open(ROWS, KV_TOKENS)
    requests = [request(model, 40, mode) for mode in ("retrieval", "ar", "retrieval")]
    for one in requests:
        texts.submit([one])
    events: dict[Request, object] = {}
    while texts.busy:
        events.update(texts.step())
    assert [isinstance(events[one], ValueError) for one in requests] == [True, False, True]
    check_empty(texts)


def test_what_never_fits_is_refused(folder: Path) -> None:
    model = llm(folder)
    texts = model.open(2, 100)
    with pytest.raises(CacheError, match="Use a shorter prompt"):
        texts.submit([request(model, 400)])
    check_empty(texts)
    texts.submit([request(model, 1, n=3, max_tokens=2)])  # two first, and then one
    (output,) = finish(texts).values()
    assert len(output.outputs) == 3


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_a_second_question_on_a_document_reads_only_what_is_new(folder: Path, mode: str) -> None:
    model = llm(folder)
    texts = model.open(ROWS, 1400)
    document, params = ids(400), ask(max_tokens=TOKENS)
    for number, (scope, fresh) in enumerate([("a", 400), ("a", 30), ("b", 400), ("a", 30)]):
        question = document + ids(30, seed=number % 3)
        one = model.request(question, params, mode, scope)
        texts.submit([one])
        with counted(model.models.target) as passes:
            while one.groups[0] not in texts.engine._groups:
                list(texts.step())
        assert fresh <= sum(passes) <= fresh + 30 + TAIL + PAGE + 10 * (fresh < 400)
        (output,) = finish(texts).values()
        assert output.outputs[0].token_ids == model.generate(question, params, mode="ar")[0].outputs[0].token_ids
    check_empty(texts)


def test_what_is_remembered_makes_room_for_who_comes(folder: Path) -> None:
    model = llm(folder)
    texts = model.open(ROWS, KV_TOKENS)
    for length in (300, 501, 500, 301):
        texts.submit([request(model, length, "ar")])
        (output,) = finish(texts).values()
        assert len(texts.engine._prefixes) >= (length - 1) // PAGE
        assert output.outputs[0].token_ids == alone(model, length, 0.8).outputs[0].token_ids
    check_empty(texts)
