"""Two schedules, and faults of the engine that they notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine_scene import LATE, ROWS, TOKENS, alone, check_empty, check_same, finish, request
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_llm import llm
from triforce.engine.engine import Request
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM


def play(model: LLM, mode: str) -> None:
    """Run a schedule in which two rows outlive an earlier row, and a later row comes to pages that they share."""
    texts = model.open(ROWS, 900)
    early, two_choices, late_request = (
        request(model, length, mode, n=n) for length, n in ((150, 1), (91, 2), (260, 1))
    )
    texts.submit([early])
    for _ in range(4):
        texts.step()
    texts.submit([two_choices])
    outputs: dict[Request, RequestOutput] = {}
    while early not in outputs:
        for finished_request, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[finished_request] = event
    texts.submit([late_request])
    outputs |= finish(texts)
    for finished_request, output in outputs.items():
        check_same(output.outputs, alone(model, len(finished_request.prompt), mode=mode))
    check_empty(texts)


def play_swapped(model: LLM, mode: str) -> None:
    """Run a schedule in which two rows are swapped out in mid-text, and swapped in to other pages."""
    texts = model.open(ROWS, 900)
    two_choices = request(model, 150, mode, n=2, max_tokens=LATE)
    swapping_request = request(model, 260, mode, seed=11)
    texts.submit([two_choices])
    (group,) = two_choices.groups
    while len(group.sequences[0].tokens) < 9:
        texts.step()
        assert group.error is None
    tables = texts.core.batches[mode].top.cache.pool.tables
    texts.core.swap_out(group)
    texts.submit([swapping_request])
    texts.core.scheduler.groups.reverse()
    outputs: dict[Request, RequestOutput] = {}
    moved = False
    while texts.busy:
        for finished_request, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[finished_request] = event
        moved |= (
            group in texts.core.scheduler.running and tables[0] not in texts.core.batches[mode].top.cache.pool.tables
        )
    assert moved
    check_same(outputs[two_choices].outputs, alone(model, 150, mode=mode, tokens=LATE))
    check_same(outputs[swapping_request].outputs, alone(model, 260, mode=mode))
    check_empty(texts)


def failures(folder: Path, mutant: Mutant | None) -> list[Exception]:
    """Return the errors of both schedules under each coupling, with the mutant in place of the code."""
    errors = []
    for coupling, refresh in (("seeded", 1), ("rejection", 1), ("seeded", 0)):
        model = llm(folder, coupling=coupling, retrieval_refresh=refresh)
        for length, tokens in ((91, TOKENS), (150, TOKENS), (260, TOKENS), (150, LATE)):
            alone(model, length, mode="triforce", tokens=tokens)
        with pytest.MonkeyPatch.context() as patch:
            if mutant:
                mutant.apply(patch)
            try:
                play(model, "triforce")
                play_swapped(model, "triforce")
            except Exception as error:
                errors.append(error)
    return errors


def test_engine_schedules_without_mutant_pass(folder: Path) -> None:
    assert failures(folder, None) == []


@pytest.mark.parametrize("mutant", caught_in("test_engine_mutant_is_noticed"), ids=str)
def test_engine_mutant_is_noticed(folder: Path, mutant: Mutant) -> None:
    assert failures(folder, mutant)
