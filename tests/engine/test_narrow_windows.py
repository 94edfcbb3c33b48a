"""Layers with a window that keep their windows alone: every text is that of whole KV, whatever its rows go through."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from tests.engine.test_engine_mutants import play, play_swapped
from tests.helpers.engine_scene import LATE, TOKENS, alone, check_empty, check_same, finish, prompt, request
from tests.helpers.family_models import SIZES, family_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.narrow_windows import narrow, whole
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import CONTEXT, MODES, ask, counted, ids
from triforce.backends import native_loader
from triforce.errors import TriforceError
from triforce.interface.outputs import RequestOutput
from triforce.kvcache.prompt_file import size_of
from triforce.llm import LLM
from triforce.session import Session

if native_loader.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
FAMILIES = ["gemma-3", "gpt-oss", "mistral-window"]
"""Of the last all layers have a window."""
SLACK = 40
PLAYED = "gemma-3"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def llm(home: Path, name: str, **how: Any) -> LLM:
    if not (home / name).exists():
        save(family_model(name, max_position_embeddings=CONTEXT), home / name)
    draft = save(tiny_model(**SIZES | dict(num_hidden_layers=1, max_position_embeddings=CONTEXT)), home / "draft")
    return LLM(home / name, draft, retrieval_budget=64, speculative_tokens=4, searched_layers="none", **how)


@pytest.fixture(autouse=True)
def narrow_windows() -> Iterator[None]:
    with narrow(SLACK):
        yield


def plain(model: LLM, length: int, mode: str = "ar", tokens: int = TOKENS) -> Any:
    """The texts of whole KV."""
    with whole():
        model.reset_prefix_cache()
        texts = alone(model, length, mode=mode, tokens=tokens)
        model.reset_prefix_cache()
    return texts


@pytest.mark.parametrize("how", [{}, {"kv_dtype": "int8"}, {"lower_tiers": "int8"}], ids=["same", "int8 KV", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_narrow_windows_give_the_texts_of_whole_kv(home: Path, name: str, how: dict[str, str]) -> None:
    """A batch of rows of different lengths, of which some have the same prompt, in every mode."""
    model, lengths = llm(home, name, **how), (40, 150, 400)
    wanted = {length: [each.token_ids for each in plain(model, length)] for length in lengths}
    for mode in MODES:
        model.reset_prefix_cache()
        outputs = model.generate([prompt(length) for length in lengths], ask(max_tokens=TOKENS, n=2), mode=mode)
        for length, output in zip(lengths, outputs, strict=True):
            assert [each.token_ids for each in output.outputs] == wanted[length]


@pytest.mark.parametrize("policy", ["mean_key", "quest"])
def test_narrow_windows_select_as_whole_kv_does(home: Path, policy: str) -> None:
    model = llm(home, PLAYED, retrieval_policy=policy)
    wanted = plain(model, 400, "retrieval")
    check_same(alone.__wrapped__(model, 400, mode="retrieval"), wanted)


def check_schedules(model: LLM) -> None:
    """Rows that come, leave, share their beginnings, and are swapped out and in."""
    for length, tokens in ((91, TOKENS), (150, TOKENS), (260, TOKENS), (150, LATE)):
        plain(model, length, "triforce", tokens)
    play(model, "triforce")
    play_swapped(model, "triforce")


def check_branches(model: LLM) -> None:
    """Questions about a document, whose windows other texts then push out of memory; its other pages stay."""
    texts, document = model.open(1, 2400), prompt(260)
    others = [(ids(300, seed=seed), 0) for seed in (20, 21, 22)]
    asked = [(document + ids(more, seed=more), cached) for more, cached in ((30, 0), (200, 256), (20, 0), (200, 256))]
    for text, cached in (*asked[:2], *others, *asked[2:]):
        one = model.request(text, ask(), "triforce")
        texts.submit([one])
        output = finish(texts)[one]
        with whole():
            wanted = model.generate(text, ask(), mode="ar")[0]
            model.reset_prefix_cache()
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert one.groups[0].cached == cached
    check_empty(texts)


def test_narrow_windows_rows_that_come_and_go_keep_their_texts(home: Path) -> None:
    check_schedules(llm(home, PLAYED))


def test_narrow_windows_prefix_without_its_window_is_read_again_once(home: Path) -> None:
    check_branches(llm(home, PLAYED))


@pytest.mark.parametrize("mutant", caught_in("test_narrow_windows_mutant_is_noticed"), ids=str)
def test_narrow_windows_mutant_is_noticed(home: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(home, PLAYED)
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, TriforceError, ValueError)):
        check_schedules(model)


def test_narrow_windows_take_turns_and_keep_their_texts(home: Path) -> None:
    model = llm(home, PLAYED)
    wanted = {length: [plain(model, length)[0]] for length in (150, 260, 400)}
    texts = model.open(1, CONTEXT, turn=3)
    requests = [request(model, length, "retrieval") for length in wanted]
    texts.submit(requests)
    for one, output in finish(texts).items():
        assert [output.outputs[0].token_ids] == [each.token_ids for each in wanted[len(one.prompt)]]
    check_empty(texts)


def test_narrow_windows_hold_fewer_bytes(home: Path) -> None:
    model = llm(home, PLAYED)
    texts = model.open(1, CONTEXT)
    one = request(model, 400)
    texts.submit([one])
    most = 0
    while texts.busy:
        texts.step()
        if windows := texts.core.store.pool.windows:
            most = max(most, windows.store.pages - len(windows.store.free))
    pool = texts.core.store.pool
    assert pool.windows and 0 < most <= pool.windows.store.pages == 2 * pool.windows.most < pool.store.pages / 2
    with whole():
        everything = model.open(1, CONTEXT).core.store.pool
    layers, windowed = len(pool.apart), pool.apart.count(True)
    assert everything.bytes.device_bytes == everything.token_bytes * (pool.store.pages + 1) * 16
    saved = (pool.store.pages - pool.windows.store.pages) * 16 * pool.token_bytes * windowed // layers
    assert pool.bytes.device_bytes == everything.bytes.device_bytes - saved
    check_empty(texts)


def test_narrow_windows_memory_is_free_with_its_last_owner(home: Path) -> None:
    """Without a collection of cycles: KV is large."""
    model = llm(home, PLAYED)
    gc.collect()
    gc.disable()
    try:
        texts = model.open(1, CONTEXT)
        texts.submit([request(model, 91)])
        finish(texts)
        pool = ref(texts.core.store.pool)
        del texts
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_narrow_windows_session_turns_equal_whole_conversation(home: Path, mode: str) -> None:
    """One turn changes what was said long before, behind which the windows are gone."""
    model = llm(home, PLAYED, mode=mode)
    session, conversation = Session(model), prompt(300)
    for number in range(4):
        *_, output = session.ask(conversation, ask(seed=number))
        assert isinstance(output, RequestOutput)
        with whole():
            model.reset_prefix_cache()
            wanted = model.generate(conversation, ask(seed=number), mode="ar")[0]
        answer = output.outputs[0].token_ids
        assert answer == wanted.outputs[0].token_ids
        conversation = conversation[: 500 if number != 1 else 90] + answer + ids(7 * number + 1, seed=number)


def check_turn(model: LLM, session: Session, conversation: list[int]) -> int:
    """Return how many tokens a turn feeds, whose answer is that of whole KV."""
    with counted(model.models.target) as passes:
        *_, output = session.ask(conversation, ask(max_tokens=100))
    assert isinstance(output, RequestOutput)
    with whole():
        model.reset_prefix_cache()
        wanted = model.generate(conversation, ask(max_tokens=100), mode="ar")[0]
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    return sum(passes)


def give_up(read: int, tokens: int) -> None:
    if read == tokens:
        raise InterruptedError


def check_going_back(model: LLM) -> None:
    """Turns that leave out the answer before them, long as it is, and what a turn that was given up left behind."""
    session, conversation = Session(model), prompt(300)
    for common, again in ((300, True), (300, False), (310, False), (200, False), (0, True)):
        assert (check_turn(model, session, conversation) > 300) == again
        conversation = conversation[:common] + ids(30, seed=common)
    session, conversation = Session(model), prompt(300)
    check_turn(model, session, conversation)
    other = conversation[:280] + ids(250, seed=60)
    with pytest.raises(InterruptedError):
        deque(session.ask(other, ask(), give_up), maxlen=0)
    assert check_turn(model, session, other[:295] + ids(40, seed=61)) > 300


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
    model, file, document = llm(home, PLAYED), tmp_path / "cache", prompt(300)
    model.generate(document, ask(), save_cache=file)
    other = document[:common] + ids(40 if common < 300 else 0, seed=9)
    with counted(model.models.target) as passes:
        output = model.generate(other, ask(max_tokens=1), mode="ar", load_cache=file)[0]
    with whole():
        wanted = model.generate(other, ask(max_tokens=1), mode="ar")[0]
        model.reset_prefix_cache()
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert len(other) - sum(passes) == read
    assert file.stat().st_size < size_of(model.open(1, 400).core.store.pool, 300) + 5_000
