"""Prompts of several requests are prefilled by turns: short ones first, and none starves."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.engine_scene import ROWS, TOKENS, alone, check_empty, check_same, request
from tests.helpers.tiny_llm import ask, ids, llm
from triforce.engine.engine import Request
from triforce.engine.sequence_group import Status
from triforce.interface.outputs import RequestOutput


def test_short_prompt_is_read_beside_long_one(folder: Path) -> None:
    """The short prompt is admitted during the long prefill and gets three quarters. Both texts equal those alone."""
    model = llm(folder)
    engine = model.open(ROWS, 1400)
    long = request(model, 501, "ar")
    short = request(model, 150, "ar")
    engine.submit([long])
    engine.step()
    assert list(engine.core.prefilling) == long.groups
    engine.submit([short])
    order = list[Request]()
    while engine.busy:
        for stepped_request, event in engine.step():
            assert not isinstance(event, Exception), event
            if stepped_request not in order:
                order.append(stepped_request)
                unread_tokens = [group.tokens_to_prefill for group in engine.core.prefilling]
            if isinstance(event, RequestOutput):
                check_same(event.outputs, alone(model, len(stepped_request.prompt), mode="ar"))
        if order == [short]:
            assert unread_tokens and unread_tokens[0] > 100, "the long prompt was not read before"
    assert order == [short, long]
    check_empty(engine)


def test_tokens_to_prefill_are_of_one_prompt_for_all_completions(folder: Path) -> None:
    """The KV of the other completions is copied: a prompt of two completions does not count twice."""
    model = llm(folder)
    engine = model.open(ROWS, 1400)
    request_of_two = model.request(ids(501), ask(n=2, max_tokens=2), "ar")
    engine.submit([request_of_two])
    (group,) = request_of_two.groups
    while group.status is not Status.RUNNING:
        engine.step()
        assert group.tokens_to_prefill == (500 - group.prefilled_tokens if group.status is Status.PREFILLING else 0)
    engine.close()


def test_long_prompt_does_not_starve_behind_short_ones(folder: Path) -> None:
    """Short prompts keep coming. A quarter of the tokens belongs to the long one."""
    model = llm(folder)
    engine = model.open(ROWS, 1400)
    long = request(model, 501, "ar", max_tokens=2)
    engine.submit([long])
    engine.step()
    asked = 0
    while long.groups[0].status is not Status.RUNNING:
        if not any(group.tokens_to_prefill for group in engine.core.scheduler.groups if group is not long.groups[0]):
            asked += 1
            engine.submit([request(model, 190 + asked % 2, "ar", scope=str(asked), max_tokens=1)])
        engine.step()
        assert asked < 60
    assert asked > 3
    engine.close()


def test_prompt_waits_for_its_beginning_that_another_one_reads(folder: Path) -> None:
    """A shared prefix is prefilled once: the shorter prompt starts behind it, before the longer one ends."""
    model = llm(folder)
    engine = model.open(ROWS, 1400)
    long = request(model, 501, "ar")
    short = model.request([*long.prompt[:200], *ids(60, seed=5)], ask(max_tokens=TOKENS), "ar", "")
    for queued_request in (long, short):
        engine.submit([queued_request])
    outputs = list[RequestOutput]()
    while engine.busy:
        outputs += [event for _, event in engine.step() if isinstance(event, RequestOutput)]
        if short.groups[0].started and long.groups[0] in engine.core.prefilling:
            assert long.groups[0].prefilled_tokens >= 192
    assert {len(output.prompt_token_ids): output.cached_tokens for output in outputs} == {501: 0, 260: 192}
    check_empty(engine)
