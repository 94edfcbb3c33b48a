"""Progress of prefills, as `on_prefill` receives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_llm import ask, ids, llm


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_prompt_of_several_choices_counts_once_in_progress(folder: Path, choices: int) -> None:
    """A second prompt runs beside it, and there may be more choices than rows."""
    model = llm(folder)
    reports = list[tuple[int, int]]()
    engine = model.open(2)
    requests = [model.request(ids(n, seed=n), ask(n=choices, max_tokens=2)) for n in (101, 41)]
    engine.submit(requests, on_prefill=lambda read_tokens, total: reports.append((read_tokens, total)))
    while engine.busy:
        engine.step()
    assert {total for _, total in reports} == {140} and reports[-1] == (140, 140)
    assert [read_tokens for read_tokens, _ in reports] == sorted(read_tokens for read_tokens, _ in reports)
    engine.close()
