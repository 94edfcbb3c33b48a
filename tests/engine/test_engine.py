"""Scheduling of requests: prefill, waiting, swapping, cancellation, errors, and shared prefixes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine_scene import (
    CHUNK,
    KV_TOKENS,
    READ,
    ROWS,
    TOKENS,
    alone,
    check_empty,
    check_same,
    finish,
    request,
)
from tests.helpers.tiny_llm import MODES, ask, counted, ids, llm
from triforce.backends import dispatch
from triforce.backends.kernel_api import ForwardBatch
from triforce.engine.engine import Request
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import SequenceGroup
from triforce.errors import CacheError
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import PAGE, FullView
from triforce.kvcache.views.full import TAIL
from triforce.ragged import Ints


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_batched_row_follows_law_under_rejection(folder: Path, mode: str) -> None:
    """`rejection` promises an equal law only. Noise and tiers belong to the row, so the whole output is equal."""
    model = llm(folder, coupling="rejection")
    engine = model.open(ROWS, KV_TOKENS)
    engine.submit([request(model, 150, mode, max_tokens=3, seed=3)])
    for _ in range(2):
        engine.step()
    late_request = request(model, 90, mode, temperature=0.8, n=2)
    engine.submit([request(model, 40, mode, max_tokens=9, seed=4)])
    engine.submit([late_request])
    (output,) = (event for finished_request, event in finish(engine).items() if finished_request is late_request)
    check_same(output.outputs, alone(model, 90, mode=mode))


def test_running_texts_continue_during_long_prefill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(folder)
    fed = list[int]()
    engine = model.open(ROWS, 1400)
    short = request(model, 40, max_tokens=200)
    long = request(model, 501, max_tokens=2)
    engine.submit([short])
    engine.step()
    plain = SequenceBatch.step
    monkeypatch.setattr(SequenceBatch, "step", lambda batch: (fed.append(engine.core.kv_tokens), plain(batch))[1])
    engine.submit([long])
    while long.groups[0] not in engine.core.scheduler.running:
        assert any(stepped_request is short for stepped_request, _ in engine.step())
    longest = max(b - a for a, b in pairwise(fed))
    assert len(fed) >= 500 // (READ + CHUNK) and longest <= READ + CHUNK + model.speculation.reach
    engine.close()
    check_empty(engine)


def test_requests_start_first_come_first_served(folder: Path) -> None:
    """A request that fits must not overtake an earlier one that does not."""
    model = llm(folder)
    engine = model.open(ROWS, KV_TOKENS)
    started_requests: list[Request] = []
    requests = [request(model, 400, "ar", max_tokens=30), request(model, 501, "ar"), request(model, 1, "retrieval")]
    for queued_request in requests:
        engine.submit([queued_request])
    while engine.busy:
        engine.step()
        started_requests += [
            queued_request
            for queued_request in requests
            if queued_request.started is not None and queued_request not in started_requests
        ]
        assert requests[1] not in started_requests or requests[0].done
    assert started_requests == requests
    check_empty(engine)


def test_request_after_its_turn_is_swapped_out_and_resumes(folder: Path) -> None:
    """Two requests that fill the KV pool run by turns. A third one does not wait for the end of both."""
    model = llm(folder)
    engine = model.open(ROWS, 150, turn=3)
    long = [request(model, 150, "ar", max_tokens=60), request(model, 91, "triforce", max_tokens=100)]
    short = request(model, 40, "ar", max_tokens=2)
    for queued_request in [*long, short]:
        engine.submit([queued_request])
    swaps = 0
    previously_swapped = list[SequenceGroup]()
    done = list[Request]()
    started = {queued_request: queued_request.started for queued_request in long}
    while engine.busy:
        for queued_request, event in engine.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                done.append(queued_request)
                expected_outputs = alone(
                    model,
                    len(queued_request.prompt),
                    mode=queued_request.mode,
                    tokens=queued_request.sequences[0].params.max_tokens,
                )
                check_same(event.outputs, expected_outputs)
        swapped = [group for group in engine.core.scheduler.waiting if group.swapped]
        swaps = swaps + len([group for group in swapped if group not in previously_swapped])
        previously_swapped = swapped
        assert sum(engine.core.scheduler.pages(group) for group in swapped) <= 2 * engine.core.store.pages
        started = {queued_request: started[queued_request] or queued_request.started for queued_request in long}
    assert (
        swaps > 3
        and done[0] is short
        and {queued_request: queued_request.started for queued_request in long} == started
    )
    check_empty(engine)


def test_idle_queue_swaps_nobody_out(folder: Path) -> None:
    engine = llm(folder).open(ROWS, KV_TOKENS, turn=1)
    engine.submit([request(llm(folder), 40, "ar", max_tokens=30)])
    while engine.busy:
        engine.step()
        assert not engine.core.scheduler.waiting
    check_empty(engine)


def test_swapped_request_can_be_cancelled(folder: Path) -> None:
    model = llm(folder)
    engine = model.open(ROWS, KV_TOKENS)
    swapped_request = request(model, 91, "triforce", n=2)
    engine.submit([swapped_request])
    for _ in range(4):
        engine.step()
    (group,) = swapped_request.groups
    engine.core.swap_out(group)
    assert group.swapped and engine.core.kv_tokens == 0
    engine.core.swap_out(group)  # there is nothing to swap out
    assert engine.core.scheduler.waiting == [group]
    engine.cancel(swapped_request)
    assert group.swapped is None
    check_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 4, 30])
def test_cancelled_request_frees_pages_at_once(folder: Path, steps: int) -> None:
    model = llm(folder)
    engine = model.open(ROWS, KV_TOKENS)
    cancelled_request = request(model, 260, "triforce", n=2, max_tokens=100)
    engine.submit([cancelled_request])
    for _ in range(steps):
        engine.step()
    engine.cancel(cancelled_request)
    check_empty(engine)
    engine.cancel(cancelled_request)
    assert not engine.busy


def test_failed_pass_ends_its_rows_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(folder)
    plain = SequenceBatch.step

    def step(batch: SequenceBatch) -> list[int]:
        if len(batch.tiers) > 1 and len(batch.sequences) > 1:
            raise ValueError("broken")
        return plain(batch)

    monkeypatch.setattr(SequenceBatch, "step", step)
    engine = model.open(ROWS, KV_TOKENS)
    requests = [request(model, 40, mode) for mode in ("retrieval", "ar", "retrieval")]
    for submitted_request in requests:
        engine.submit([submitted_request])
    events: dict[Request, object] = {}
    while engine.busy:
        events.update(engine.step())
    assert [isinstance(events[submitted_request], ValueError) for submitted_request in requests] == [True, False, True]
    check_empty(engine)


def test_out_of_memory_prefill_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error advises what needs less memory. The text beside it goes on."""
    torch = pytest.importorskip("torch")
    model = llm(folder)
    begin = FullView.begin

    def run_out(self: FullView, counts_B: Ints, width: int) -> ForwardBatch:
        if self.lengths_B.max() > 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return begin(self, counts_B, width)

    expected_outputs = alone(model, 91, mode="triforce")
    monkeypatch.setattr(FullView, "begin", run_out)
    engine = model.open(ROWS, KV_TOKENS)
    small = request(model, 91, "triforce")
    large = request(model, 260, "triforce")
    engine.submit([small])
    engine.step()
    engine.submit([large])
    ended = dict[Request, Any]()
    while engine.busy:
        ended |= {
            ended_request: event
            for ended_request, event in engine.step()
            if isinstance(event, RequestOutput | Exception)
        }
    assert isinstance(ended[large], CacheError) and "kv_offload='host'" in str(ended[large])
    check_same(ended[small].outputs, expected_outputs)
    check_empty(engine)


def test_request_larger_than_memory_is_refused(folder: Path) -> None:
    model = llm(folder)
    engine = model.open(2, 100)
    with pytest.raises(CacheError, match="Use a shorter prompt"):
        engine.submit([request(model, 400)])
    engine.submit([request(model, 1, n=3, max_tokens=2)])  # two rows first, then one
    (output,) = finish(engine).values()
    assert len(output.outputs) == 3
    check_empty(engine)


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_second_question_prefills_new_tokens_only(folder: Path, mode: str) -> None:
    model = llm(folder)
    engine = model.open(ROWS, 1400)
    document = ids(400)
    params = ask(max_tokens=TOKENS)
    for number, (scope, uncached_tokens) in enumerate([("a", 400), ("a", 30), ("b", 400), ("a", 30)]):
        question = document + ids(30, seed=number % 3)
        question_request = model.request(question, params, mode, scope)
        engine.submit([question_request])
        with counted(model.models.target) as passes:
            while question_request.groups[0] not in engine.core.scheduler.running:
                engine.step()
        assert uncached_tokens <= sum(passes) <= uncached_tokens + 30 + TAIL + PAGE
        (output,) = finish(engine).values()
        assert output.outputs[0].token_ids == model.generate(question, params, mode="ar")[0].outputs[0].token_ids
    check_empty(engine)


def test_cached_prefixes_are_evicted_for_requests(folder: Path) -> None:
    model = llm(folder)
    engine = model.open(ROWS, KV_TOKENS)
    for length in (300, 501, 500, 301):
        engine.submit([request(model, length, "ar")])
        (output,) = finish(engine).values()
        assert len(engine.core.prefixes.pages) >= (length - 1) // PAGE
        check_same(output.outputs, alone(model, length))
    check_empty(engine)


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
def test_reassigned_pages_drop_int8_copies(folder: Path) -> None:
    model = llm(folder, lower_tiers="int8", retrieval_budget=160)
    engine = model.open(2, 420)
    for length in (400, 351, 402, 301):
        engine.submit([request(model, length, "triforce")])
        (output,) = finish(engine).values()
        check_same(output.outputs, alone(model, length, mode="triforce"))
    check_empty(engine)
