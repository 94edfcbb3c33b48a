"""Prompts of the workloads: their lengths, what rows share, and what each is about."""

from __future__ import annotations

import pytest

from benchmarks.quality.eviction import shared
from triforce.bench.cells import WORKLOADS
from triforce.bench.prompts import CUE, MAKERS, NAMES, Sources, numbers, prompts
from triforce.errors import RequestError

LENGTH, ROWS = 900, 4


def test_every_workload_has_a_maker() -> None:
    assert set(MAKERS) == set(WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_rows_have_one_document_and_different_ends(sources: Sources, workload: str) -> None:
    made = prompts(sources, workload, LENGTH, ROWS)
    assert [len(prompt) for prompt in made] == [LENGTH] * ROWS
    assert len({tuple(prompt) for prompt in made}) == ROWS
    assert shared(made) > LENGTH * 3 // 4
    assert made[0] == prompts(sources, workload, LENGTH, ROWS)[0]


def test_books_and_code_begin_as_the_texts_do(sources: Sources) -> None:
    for workload, ids in (("books", sources.prose), ("code", sources.code)):
        first, second, *_ = prompts(sources, workload, LENGTH, ROWS)
        assert first == ids[:LENGTH] != second


def test_needles_are_told_once_and_asked_at_the_end(sources: Sources) -> None:
    for row, prompt in enumerate(prompts(sources, "needle", LENGTH, ROWS)):
        text = sources.tokenizer.decode(prompt)
        told = f"The secret number of {NAMES[row]} is {numbers()[row]}."
        assert text.count(told) == 1 and str(numbers()[row]) not in text[text.index(told) + len(told) :]
        assert text.rstrip().endswith(f"The secret number of {NAMES[row]} is")


def test_what_is_copied_stood_there_before(sources: Sources) -> None:
    for prompt in prompts(sources, "copy", LENGTH, ROWS):
        text = sources.tokenizer.decode(prompt[:-CUE])
        assert sources.tokenizer.decode(prompt[-CUE:]) in text[: len(text) // 2]


def test_many_shots_end_with_an_open_one(sources: Sources) -> None:
    for prompt in prompts(sources, "many-shot", LENGTH, ROWS):
        text = sources.tokenizer.decode(prompt)
        assert text.count("First:") > 3 and text.endswith("First:")


def test_texts_that_are_too_short_are_refused(sources: Sources) -> None:
    with pytest.raises(RequestError, match="--texts"):
        prompts(sources, "books", 10**6, 1)
    with pytest.raises(RequestError, match="0 tokens for workload code"):
        prompts(Sources(sources.tokenizer, []), "code", LENGTH, 1)
