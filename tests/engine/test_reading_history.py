"""Reasons for a second prefill: positions and counts, by the texts of the request's own scope."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_llm import ask, ids, llm
from triforce.engine.reading_history import MAX_SCOPES, MAX_TEXTS, ReadingHistory
from triforce.interface.outputs import RequestOutput

TEXT = ids(1000)


@pytest.mark.parametrize(
    ("prompt", "cached", "reason"),
    [
        (TEXT, 800, ""),
        (TEXT, 0, "its first 1,000 tokens were prefilled before, but are no longer cached"),
        ([*TEXT[:40], 1, *TEXT[41:]], 32, "from token 41 on it differs from recent texts"),
        ([*TEXT, *ids(600, seed=1)], 992, "from token 1,001 on it differs from recent texts"),
        ([1, *TEXT], 0, "no recent text begins like it"),
        ([1, *TEXT], 256, "only its first 256 tokens were cached"),
    ],
)
def test_reason_names_first_token_that_differs(prompt: list[int], cached: int, reason: str) -> None:
    history = ReadingHistory()
    history.record("a", TEXT)
    assert history.reread_reason("a", prompt, cached) == reason


def test_other_scopes_texts_give_no_reason() -> None:
    history = ReadingHistory()
    history.record("a", TEXT)
    assert history.reread_reason("b", TEXT, 0) == "no recent text begins like it"


def test_history_keeps_latest_texts_and_scopes() -> None:
    history = ReadingHistory()
    for text in range(MAX_TEXTS + 1):
        history.record("a", [text, *TEXT])
    assert history.reread_reason("a", [0, *TEXT], 0).startswith("no recent")
    assert history.reread_reason("a", [1, *TEXT], 0).startswith("its first")
    for scope in range(MAX_SCOPES):
        history.record(str(scope), TEXT)
    assert history.reread_reason("a", [1, *TEXT], 0).startswith("no recent")


def test_output_of_scored_prompt_says_why_it_was_read(folder: Path) -> None:
    model = llm(folder)
    prompt = ids(600)
    scores = [None, 0, None]
    outputs = [model.generate([prompt], ask(max_tokens=1, prompt_logprobs=score), mode="ar")[0] for score in scores]
    assert [output.cached_tokens > 500 for output in outputs] == [False, False, True]
    assert outputs[1].reread == "log-probabilities of its tokens were requested, which only a prefill gives"


def test_output_says_where_its_prompt_differs(folder: Path) -> None:
    engine = llm(folder).open(2, 1400)
    reasons = []
    for prompt in (ids(600), [*ids(600)[:200], 1, *ids(399, seed=1)]):
        request = llm(folder).request(prompt, ask(max_tokens=1), "ar")
        engine.submit([request])
        output = engine.finish(request)
        assert isinstance(output, RequestOutput)
        reasons.append(output.reread)
    engine.close()
    assert reasons == [
        "no recent text begins like it",
        "from token 201 on it differs from recent texts",
    ]
