"""Prompts of the workloads: their lengths, what rows share, and what each is about."""

from __future__ import annotations

import pytest

from benchmarks.quality import shared
from triforce.bench.prompts import CUE, MAKERS, NAMES, Sources, numbers, prompts
from triforce.bench.speed import WORKLOADS
from triforce.errors import RequestError

LENGTH = 900
ROWS = 4


def test_workloads_have_makers() -> None:
    assert set(MAKERS) == set(WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_batch_rows_share_document_and_differ_at_end(sources: Sources, workload: str) -> None:
    row_prompts = prompts(sources, workload, LENGTH, ROWS)
    assert [len(prompt) for prompt in row_prompts] == [LENGTH] * ROWS
    assert len({tuple(prompt) for prompt in row_prompts}) == ROWS
    assert shared(row_prompts) > LENGTH * 3 // 4
    assert row_prompts[0] == prompts(sources, workload, LENGTH, ROWS)[0]


def test_book_and_code_prompts_begin_with_source(sources: Sources) -> None:
    for workload, ids in (("books", sources.prose), ("code", sources.code)):
        first_prompt, second, *_ = prompts(sources, workload, LENGTH, ROWS)
        assert first_prompt == ids[:LENGTH] != second


def test_needle_is_placed_once_and_asked_last(sources: Sources) -> None:
    for row, prompt in enumerate(prompts(sources, "needle", LENGTH, ROWS)):
        text = sources.tokenizer.decode(prompt)
        needle = f"The secret number of {NAMES[row]} is {numbers()[row]}."
        assert text.count(needle) == 1 and str(numbers()[row]) not in text[text.index(needle) + len(needle) :]
        assert text.rstrip().endswith(f"The secret number of {NAMES[row]} is")


def test_copy_prompt_repeats_earlier_text(sources: Sources) -> None:
    for prompt in prompts(sources, "copy", LENGTH, ROWS):
        text = sources.tokenizer.decode(prompt[:-CUE])
        assert sources.tokenizer.decode(prompt[-CUE:]) in text[: len(text) // 2]


def test_many_shot_prompt_ends_unanswered(sources: Sources) -> None:
    for prompt in prompts(sources, "many-shot", LENGTH, ROWS):
        text = sources.tokenizer.decode(prompt)
        assert text.count("First:") > 3 and text.endswith("First:")


def test_prompts_of_short_texts_raise(sources: Sources) -> None:
    with pytest.raises(RequestError, match="--texts"):
        prompts(sources, "books", 10**6, 1)
    with pytest.raises(RequestError, match="0 tokens for workload code"):
        prompts(Sources(sources.tokenizer, []), "code", LENGTH, 1)
