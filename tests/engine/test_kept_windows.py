"""Window pages that layers keep beyond their rows: in sessions, in saved prompts and in the disk cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_scene import prompt
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.narrow_windows import PLAYED, SLACK, llm, narrow, whole
from tests.helpers.tiny_llm import ask, counted, ids
from triforce.backends import dispatch
from triforce.disk_cache.prompt_file import size_of
from triforce.errors import TriforceError
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.session import Session

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def narrow_windows() -> Iterator[None]:
    with narrow(SLACK):
        yield


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_narrow_windows_session_turns_equal_whole_conversation(home: Path, mode: str) -> None:
    """One turn edits the history far back, where the windows have been dropped."""
    model = llm(home, PLAYED, mode=mode)
    session = Session(model)
    conversation = prompt(300)
    for number in range(4):
        *_, output = session.ask(conversation, ask(seed=number))
        assert isinstance(output, RequestOutput)
        with whole():
            model.reset_prefix_cache()
            expected_output = model.generate(conversation, ask(seed=number), mode="ar")[0]
        answer = output.outputs[0].token_ids
        assert answer == expected_output.outputs[0].token_ids
        conversation = conversation[: 500 if number != 1 else 90] + answer + ids(7 * number + 1, seed=number)


def test_session_gives_up_its_mark_for_another_text(home: Path) -> None:
    """The windows of both texts do not fit into the pool."""
    model = llm(home, PLAYED)
    with narrow(400):
        session = Session(model)
        for text in (ids(480, seed=1), ids(580, seed=2)):
            *_, output = session.ask(text, ask(max_tokens=20))
    assert isinstance(output, RequestOutput)
    model.reset_prefix_cache()
    assert output.outputs[0].token_ids == model.generate(text, ask(max_tokens=20), mode="ar")[0].outputs[0].token_ids


def check_turn(model: LLM, session: Session, conversation: list[int]) -> int:
    """Return how many tokens a turn feeds. Its answer equals that of whole KV."""
    with counted(model.models.target) as passes:
        *_, output = session.ask(conversation, ask(max_tokens=100))
    assert isinstance(output, RequestOutput)
    with whole():
        model.reset_prefix_cache()
        expected_output = model.generate(conversation, ask(max_tokens=100), mode="ar")[0]
    assert output.outputs[0].token_ids == expected_output.outputs[0].token_ids
    return sum(passes)


def give_up(read: int, tokens: int) -> None:
    if read == tokens:
        raise InterruptedError


def check_going_back(model: LLM) -> None:
    """Check turns that leave out a long answer before them, and a turn after one that was cancelled."""
    session = Session(model)
    conversation = prompt(300)
    for common, again in ((300, True), (300, False), (310, False), (200, False), (0, True)):
        assert (check_turn(model, session, conversation) > 300) == again
        conversation = conversation[:common] + ids(30, seed=common)
    session = Session(model)
    conversation = prompt(300)
    check_turn(model, session, conversation)
    branch = conversation[:280] + ids(250, seed=60)
    with pytest.raises(InterruptedError):
        deque(session.ask(branch, ask(), give_up), maxlen=0)
    assert check_turn(model, session, branch[:295] + ids(40, seed=61)) > 300


def test_narrow_windows_session_goes_back_to_its_latest_prompt(home: Path) -> None:
    check_going_back(llm(home, PLAYED, mode="ar"))


@pytest.mark.parametrize("mutant", caught_in("test_narrow_windows_session_mutant_is_noticed"), ids=str)
def test_narrow_windows_session_mutant_is_noticed(home: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(home, PLAYED, mode="ar")
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, TriforceError, ValueError)):
        check_going_back(model)


@pytest.mark.parametrize(("common", "read"), [(300, 283), (290, 290), (180, 0)])
def test_narrow_windows_saved_prompt_starts_where_it_has_windows(
    home: Path, tmp_path: Path, common: int, read: int
) -> None:
    model = llm(home, PLAYED)
    file = tmp_path / "cache"
    document = prompt(300)
    model.generate(document, ask(), save_cache=file)
    branch = document[:common] + ids(40 if common < 300 else 0, seed=9)
    with counted(model.models.target) as passes:
        output = model.generate(branch, ask(max_tokens=1), mode="ar", load_cache=file)[0]
    with whole():
        expected_output = model.generate(branch, ask(max_tokens=1), mode="ar")[0]
        model.reset_prefix_cache()
    assert output.outputs[0].token_ids == expected_output.outputs[0].token_ids
    assert len(branch) - sum(passes) == read
    assert file.stat().st_size < size_of(model.open(1, 400).core.store.pool, 300) + 5_000
