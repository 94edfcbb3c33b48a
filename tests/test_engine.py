"""Requests come, go and are cancelled at any step: the text of each is that of the same request alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
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

from tests.laws.mutants import Edit
from triforce import engine
from triforce.batch import Batch
from triforce.cache import PAGE, Full, Pool, Retrieval, Streaming, full
from triforce.cache.prefixes import LEFT
from triforce.completion import Piece
from triforce.errors import CacheError
from triforce.group import Group
from triforce.kernels import extension
from triforce.llm import LLM
from triforce.request import CompletionOutput, RequestOutput
from triforce.speculation.count import Counters
from triforce.texts import Request, Texts

torch.set_num_threads(1)
LENGTHS = [1, 40, 91, 150, 151, 260]
ROWS, KV_TOKENS, TOKENS, LATE = 4, 700, 20, 40
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
def alone(
    model: LLM, length: int, temperature: float = 0.8, mode: str = "ar", tokens: int = TOKENS
) -> list[CompletionOutput]:
    """Two choices."""
    params = ask(temperature=temperature, max_tokens=tokens, n=2)
    return model.generate(prompt(length), params, mode=mode)[0].outputs


def check_same(outputs: Sequence[CompletionOutput], wanted: Sequence[CompletionOutput]) -> None:
    """The text, and which tier proposed what, how often and with what success: a wrong guess shows in no text."""
    for one, other in zip(outputs, wanted, strict=False):
        assert one.token_ids == other.token_ids and one.origins == other.origins
        for tier, own in zip(one.tiers, other.tiers, strict=True):
            assert tier.histogram == own.histogram
            assert (tier.proposed, tier.accepted, tier.passes) == (own.proposed, own.accepted, own.passes)


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
    """Any sequence of requests, steps, cancellations, and of rows put aside."""

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
        tokens=st.sampled_from([1, 7, TOKENS]),
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

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def stand_aside(self, which: int) -> None:
        one = list(self.running)[which % len(self.running)]
        for group in one.groups:
            self.texts.engine.put_aside(group)

    def step(self) -> None:
        for one, event in self.texts.step():
            if isinstance(event, Piece):
                self.running[one][event.index] += event.token_ids
                continue
            assert isinstance(event, RequestOutput), event
            texts = [output.token_ids for output in event.outputs]
            assert texts == self.running.pop(one)
            which, tokens = (len(one.prompt), self.temperatures[one]), one.jobs[0].params.max_tokens
            plain = alone(self.model, *which, tokens=tokens)
            assert texts == [each.token_ids for each in plain[: len(texts)]] and len(texts[0]) == tokens
            if one.mode != "auto":  # whose pilot looks at all rows, and at the clock
                check_same(event.outputs, alone(self.model, *which, one.mode, tokens))
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
        while self.running and self.texts.busy:
            self.step()
        check_empty(self.texts)


def play(model: LLM, mode: str) -> None:
    """One schedule: two rows outlive one that came before them, and see another one come, to pages that are shared."""
    texts = model.open(ROWS, 900)
    early, twins, last = (request(model, length, mode, n=n) for length, n in ((150, 1), (91, 2), (260, 1)))
    texts.submit([early])
    for _ in range(4):
        list(texts.step())
    texts.submit([twins])
    outputs: dict[Request, RequestOutput] = {}
    while early not in outputs:
        outputs.update((one, event) for one, event in texts.step() if isinstance(event, RequestOutput))
    texts.submit([last])
    outputs |= finish(texts)
    for one, output in outputs.items():
        check_same(output.outputs, alone(model, len(one.prompt), mode=mode))
    check_empty(texts)


def play_aside(model: LLM, mode: str) -> None:
    """Another one: two rows are put aside in the middle of their texts, and come back to pages that are others."""
    texts = model.open(ROWS, 900)
    twins, other = request(model, 150, mode, n=2, max_tokens=LATE), request(model, 260, mode, seed=11)
    texts.submit([twins])
    (group,) = twins.groups
    while len(group.jobs[0].tokens) < 9:
        list(texts.step())
        assert group.error is None
    tables = texts.engine._batches[mode].top.cache.pool.tables
    texts.engine.put_aside(group)
    texts.submit([other])
    texts.engine._waiting.rotate(1)
    outputs: dict[Request, RequestOutput] = {}
    moved = False
    while texts.busy:
        for one, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[one] = event
        moved |= group in texts.engine._groups and tables[0] not in texts.engine._batches[mode].top.cache.pool.tables
    assert moved
    check_same(outputs[twins].outputs, alone(model, 150, mode=mode, tokens=LATE))
    check_same(outputs[other].outputs, alone(model, 260, mode=mode))
    check_empty(texts)


FAULTS = [
    Edit(Batch, "_sample", ("if draws is not None:", "if False:")),
    Edit(Streaming, "select", ("[each[b] for b in rows]", "each[: len(rows)]")),
    Edit(Streaming, "join", ("other.lengths_B))", "0 * other.lengths_B))")),
    Edit(Retrieval, "select", ("[self.choices[b] for b in rows]", "self.choices[: len(rows)]")),
    Edit(Retrieval, "select", ("self.ahead_B[list(rows)]", "self.ahead_B[: len(rows)]")),
    Edit(Full, "select", ("[self.sights[b] for b in rows]", "self.sights[: len(rows)]")),
    Edit(Pool, "select", ("self.lengths_B[list(rows)]", "self.lengths_B[: len(rows)]")),
    Edit(Pool, "disown", (" if not self._owners[page]", "")),
    Edit(Counters, "select", ("[list(rows)]", "[: len(rows)]")),
    Edit(Batch, "bring_back", ("= row.draws", "= 0")),
    Edit(Batch, "bring_back", ("+ job.tokens", "+ job.prompt[: len(job.tokens)]")),
    Edit(Full, "bring_back", ("= seen.sight", "= self.sights[0]")),
    Edit(Retrieval, "aside", ("if choice:", "if False:")),
    Edit(Retrieval, "bring_back", ("self.row_units(b)[choice.units]", "choice.units.int()")),
    Edit(Streaming, "bring_back", ("self.highest[b] = ring", "self.highest[b] = ring[0], 0, 0")),
    Edit(Counters, "bring_back", ("= count", "= 0")),
]


@pytest.mark.parametrize(
    "fault", [None, *FAULTS], ids=lambda fault: str(fault and f"{fault.owner.__name__}.{fault.name}: {fault.changes}")
)
def test_faults_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Edit | None) -> None:
    noticed = []
    for coupling, refresh in (("seeded", 1), ("rejection", 1), ("seeded", 0)):
        model = llm(folder, coupling=coupling, refresh=refresh)
        for length, tokens in ((91, TOKENS), (150, TOKENS), (260, TOKENS), (150, LATE)):
            alone(model, length, mode="triforce", tokens=tokens)
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(fault.owner, fault.name, fault.function())
            try:
                play(model, "triforce")
                play_aside(model, "triforce")
            except Exception as error:
                noticed.append(error)
    assert bool(noticed) == bool(fault), noticed


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
    check_same(output.outputs, alone(model, 90, mode=mode))


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


def test_who_had_a_turn_makes_room_and_goes_on_later(folder: Path) -> None:
    """Two that fill the store come to their ends by turns; a third one waits less than for both."""
    model = llm(folder)
    texts = model.open(ROWS, 150, turn=3)
    long = [request(model, 150, "ar", max_tokens=60), request(model, 91, "triforce", max_tokens=100)]
    short = request(model, 40, "ar", max_tokens=2)
    for one in [*long, short]:
        texts.submit([one])
    asides, before = 0, list[Group]()
    done, started = list[Request](), {one: one.started for one in long}
    while texts.busy:
        for one, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                done.append(one)
                wanted = alone(model, len(one.prompt), mode=one.mode, tokens=one.jobs[0].params.max_tokens)
                check_same(event.outputs, wanted)
        aside = [group for group in texts.engine._waiting if group.aside]
        asides, before = asides + len([group for group in aside if group not in before]), aside
        assert sum(texts.engine._pages(group) for group in aside) <= 2 * texts.engine.store.pages
        started = {one: started[one] or one.started for one in long}
    assert asides > 3 and done[0] is short and {one: one.started for one in long} == started
    check_empty(texts)


def test_nobody_is_put_aside_where_nobody_waits(folder: Path) -> None:
    texts = llm(folder).open(ROWS, KV_TOKENS, turn=1)
    texts.submit([request(llm(folder), 40, "ar", max_tokens=30)])
    while texts.busy:
        list(texts.step())
        assert not texts.engine._waiting
    check_empty(texts)


def test_what_was_put_aside_can_be_cancelled(folder: Path) -> None:
    model = llm(folder)
    texts = model.open(ROWS, KV_TOKENS)
    one = request(model, 91, "triforce", n=2)
    texts.submit([one])
    for _ in range(4):
        list(texts.step())
    (group,) = one.groups
    texts.engine.put_aside(group)
    assert group.aside and texts.engine.kv_tokens == 0
    texts.engine.put_aside(group)  # nothing is there to be put aside
    assert list(texts.engine._waiting) == [group]
    texts.cancel(one)
    assert group.aside is None
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
        assert fresh <= sum(passes) <= fresh + 30 + LEFT + PAGE
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
        check_same(output.outputs, alone(model, length))
    check_empty(texts)


@pytest.mark.skipif(extension.native is None, reason="the native kernels were not built")
def test_pages_that_change_hands_leave_no_int8_copies(folder: Path) -> None:
    model = llm(folder, lower_tiers="int8", budget=160)
    texts = model.open(2, 420)
    for length in (400, 351, 402, 301):
        texts.submit([request(model, length, "triforce")])
        (output,) = finish(texts).values()
        check_same(output.outputs, alone(model, length, mode="triforce"))
    check_empty(texts)
