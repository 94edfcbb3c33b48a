"""A session gives one answer at a time: a concurrent one raises, and one after it is right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.tiny_llm import ask, ids, llm
from triforce.engine.engine import OutputChunk
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.session import Session


def text_of(parts: list[OutputChunk | RequestOutput]) -> list[int]:
    return [token for part in parts if isinstance(part, OutputChunk) for token in part.token_ids]


def fresh(model: LLM, conversation: list[int]) -> list[int]:
    return model.generate(conversation, ask(), mode="ar")[0].outputs[0].token_ids


def test_session_second_answer_beside_first_raises(pair: Path) -> None:
    """The second answer begins in another thread or in this one. The first goes on, and the next turn is right."""
    model = llm(pair)
    session = Session(model)
    conversation = ids(60)
    first_answer = session.ask(conversation, ask())
    parts = [next(first_answer)]
    with pytest.raises(RequestError, match="read that one to its end or close it"):
        next(session.ask(ids(40, seed=1), ask()))
    with ThreadPoolExecutor(1) as threads, pytest.raises(RequestError, match="is giving another answer"):
        threads.submit(lambda: next(session.ask(ids(40, seed=1), ask()))).result()
    parts += first_answer
    assert text_of(parts) == fresh(model, conversation)
    assert text_of(list(session.ask(ids(40, seed=1), ask()))) == fresh(model, ids(40, seed=1))


@pytest.mark.parametrize("ended", ["closed", "dropped", "read to its output", "never begun"])
def test_session_answers_in_turn_are_given(pair: Path, ended: str) -> None:
    model = llm(pair)
    session = Session(model)
    first_answer = session.ask(ids(60), ask())
    if ended == "read to its output":
        while not isinstance(next(first_answer), RequestOutput):
            pass
    elif ended != "never begun":
        next(first_answer)
    if ended == "closed":
        first_answer.close()
    if ended == "dropped":
        del first_answer
    second_events = list(session.ask(ids(75, seed=2), ask()))
    assert text_of(second_events) == fresh(model, ids(75, seed=2))
