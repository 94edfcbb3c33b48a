"""Conversations: the KV that a session keeps changes the duration of a turn and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.tiny_llm import CONTEXT, GREEDY, MODES, SEEDED, ask, counted, ids, llm
from triforce.engine.engine import OutputChunk
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM
from triforce.session import Session


def turn(session: Session, conversation: list[int], params: SamplingParams) -> list[int]:
    """Return the answer's ids, after a check that its chunks add up."""
    parts = list(session.ask(conversation, params))
    output = parts.pop()
    assert isinstance(output, RequestOutput)
    answer = output.outputs[0].token_ids
    assert [t for part in parts if isinstance(part, OutputChunk) for t in part.token_ids] == answer
    return answer


def fresh(model: LLM, conversation: list[int], params: SamplingParams) -> list[int]:
    return model.generate(conversation, params, mode="ar")[0].outputs[0].token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", MODES)
def test_session_turns_equal_whole_conversation(pair: Path, mode: str, sampling: dict[str, Any]) -> None:
    model = llm(pair, mode=mode)
    session = Session(model)
    conversation = ids(90)
    for number in range(4):
        params = ask(**sampling, seed=number)
        answer = turn(session, conversation, params)
        assert answer == fresh(model, conversation, params)
        conversation = conversation + answer + ids(7 * number + 1, seed=number)


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_session_prefills_new_tokens_only(pair: Path, mode: str) -> None:
    model = llm(pair, mode=mode)
    session = Session(model)
    first_prompt = ids(200)
    params = ask(max_tokens=1)
    with counted(model.models.target) as passes:
        answer = turn(session, first_prompt, params)
    assert 200 <= sum(passes) <= 200 + 20
    second = first_prompt + answer + ids(30, seed=1)
    with counted(model.models.target) as passes:
        turn(session, second, params)
    assert 30 + 1 <= sum(passes) <= 30 + 2 + 20
    with counted(model.models.target) as passes:
        turn(session, second, params)  # the same history again feeds its last tokens only
    assert TAIL <= sum(passes) <= TAIL + 1 + 20


@pytest.mark.parametrize("common", [0, 1, 40, 100, 119, 120])
def test_session_changed_history_shares_prefix(pair: Path, common: int) -> None:
    model = llm(pair)
    session = Session(model)
    history = ids(120)
    turn(session, history, ask())
    changed = history[:common] + ids(60, seed=8)
    with counted(model.models.target) as passes:
        answer = turn(session, changed, ask(max_tokens=1))
    assert answer == fresh(model, changed, ask(max_tokens=1))
    assert 60 <= sum(passes) <= 60 + 20
    turn(session, history, ask())
    assert turn(session, history, ask()) == fresh(model, history, ask())


@pytest.mark.parametrize("length", [1, 2, TAIL, TAIL + 1, TAIL + 2, 64])
def test_session_shorter_history_is_rewound(pair: Path, length: int) -> None:
    """The history is cleared, or shortened to its first question."""
    model = llm(pair)
    session = Session(model)
    turn(session, ids(150), ask())
    assert turn(session, ids(150)[:length], ask()) == fresh(model, ids(150)[:length], ask())


@pytest.mark.parametrize("chunk_count", [0, 1, 2, 5])
@pytest.mark.parametrize("mode", ["ar", "retrieval", "triforce"])
def test_session_interrupted_answer_continues(pair: Path, mode: str, chunk_count: int) -> None:
    """The caller stops after `chunk_count` chunks. The next turn is right, whatever part of the answer it quotes."""
    model = llm(pair, mode=mode)
    for quoted in (True, False):
        session = Session(model)
        conversation = ids(80)
        answer = []
        stream = session.ask(conversation, ask())
        for _ in range(chunk_count):
            piece = next(stream)
            assert isinstance(piece, OutputChunk)
            answer += piece.token_ids
        close(stream)
        conversation = conversation + answer * quoted + ids(9, seed=3)
        assert turn(session, conversation, ask()) == fresh(model, conversation, ask())


def close(stream: Iterator[Any]) -> None:
    stream.close()  # type: ignore[attr-defined]


class Stop(Exception):
    pass


def test_session_interrupted_prefill_continues(pair: Path) -> None:
    model = llm(pair)
    session = Session(model)
    conversation = ids(500)
    turn(session, ids(50, seed=7), ask(max_tokens=1))

    def stop(read_tokens: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        list(session.ask(conversation, ask(), stop))
    assert turn(session, conversation, ask()) == fresh(model, conversation, ask())


@pytest.mark.parametrize("at", range(2, 30, 3))
def test_session_interrupted_pass_leaves_no_trace(pair: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C may arrive anywhere, also between a pass and its rewind."""
    model = llm(pair, mode="triforce")
    session = Session(model)
    conversation = ids(80)
    answer = []
    sampling = type(model.models.target)
    calls = 0
    plain = sampling.__call__

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        logits = plain(self, *arguments, **options)
        if calls == at:
            raise KeyboardInterrupt
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "__call__", call)
        stream = session.ask(conversation, ask())
        with pytest.raises(KeyboardInterrupt):
            for piece in stream:
                assert isinstance(piece, OutputChunk), "it should not come to an end"
                answer += piece.token_ids
    conversation = conversation + answer + ids(9, seed=3)
    assert turn(session, conversation, ask()) == fresh(model, conversation, ask())


def test_session_answer_stopping_inside_step_continues(pair: Path) -> None:
    """Verified tokens past a stop token are in the pool, but not in the conversation."""
    model = llm(pair, mode="ar")
    speculating = llm(pair, mode="retrieval", retrieval_budget=640)  # sees all: all draft tokens are accepted
    conversation = ids(60)
    for at in range(3, 15, 2):
        stop = fresh(model, conversation, ask())[at]
        params = ask(stop_token_ids=[stop])
        session = Session(speculating)
        answer = turn(session, conversation, params)
        assert answer == fresh(model, conversation, params) and answer[-1] == stop
        longer = conversation + answer + ids(5, seed=at)
        assert turn(session, longer, params) == fresh(model, longer, params)


def test_session_runs_to_end_of_context(pair: Path) -> None:
    model = llm(pair)
    session = Session(model)
    conversation = ids(CONTEXT - 20)
    answer = turn(session, conversation, ask(max_tokens=1000))
    assert len(answer) == 20 and answer == fresh(model, conversation, ask(max_tokens=1000))
    with pytest.raises(RequestError, match="context"):
        turn(session, conversation + answer, ask())
    assert turn(session, conversation[:-9], ask()) == fresh(model, conversation[:-9], ask())


def test_session_refused_question_changes_nothing(pair: Path) -> None:
    model = llm(pair)
    session = Session(model)
    conversation = ids(70)
    answer = turn(session, conversation, ask())
    for wrong in ([], [97], [-1], ids(CONTEXT + 1)):
        with pytest.raises(RequestError):
            turn(session, wrong, ask())
    longer = conversation + answer + ids(4, seed=2)
    assert turn(session, longer, ask()) == fresh(model, longer, ask())


def test_session_two_of_one_model_are_independent(pair: Path) -> None:
    model = llm(pair)
    sessions = [Session(model), Session(model)]
    talks = [ids(60, seed=1), ids(75, seed=2)]
    for number in range(3):
        streams = [session.ask(talk, ask(seed=number)) for session, talk in zip(sessions, talks, strict=True)]
        answers: list[list[int]] = [[], []]
        while True:  # side by side
            parts = [next(stream, None) for stream in streams]
            if parts == [None, None]:
                break
            for answer, part in zip(answers, parts, strict=True):
                answer += part.token_ids if isinstance(part, OutputChunk) else []
        for i, talk in enumerate(talks):
            assert answers[i] == fresh(model, talk, ask(seed=number))
            talks[i] = talk + answers[i] + ids(3, seed=number)


def test_session_random_conversation_equals_whole(pair: Path) -> None:
    """Turns go on, go back, branch off and are interrupted, in any order."""
    chance = Random(0)
    model = llm(pair)
    session = Session(model)
    talk = ids(40)
    for number in range(15):
        params = ask(seed=number, max_tokens=chance.randint(1, 12), temperature=chance.choice([0.0, 0.8]))
        if chance.random() < 0.3:
            stream = session.ask(talk, params)
            for _ in range(chance.randint(0, 3)):
                next(stream, None)
            close(stream)
        answer = turn(session, talk, params)
        assert answer == fresh(model, talk, params)
        talk = talk + answer if chance.random() < 0.7 else talk[: chance.randint(1, len(talk))]
        talk = talk[:300] + ids(chance.randint(0, 25), seed=number)


def test_session_several_choices_raise(pair: Path) -> None:
    with pytest.raises(RequestError, match="one answer at a time"):
        next(iter(Session(llm(pair)).ask(ids(20), ask(n=2))))
