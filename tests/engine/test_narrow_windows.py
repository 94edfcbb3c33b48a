"""Layers with a window keep only their windows: under any schedule, every text equals that of whole KV."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from weakref import ref

import pytest

from tests.engine.test_engine_mutants import play, play_swapped
from tests.helpers.engine_scene import LATE, TOKENS, alone, check_empty, check_same, finish, prompt, request
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.narrow_windows import PLAYED, SLACK, llm, narrow, plain, whole
from tests.helpers.slow_parameters import slow
from tests.helpers.tiny_llm import CONTEXT, MODES, ask, ids
from triforce.backends import dispatch
from triforce.errors import TriforceError
from triforce.llm import LLM

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
FAMILIES = ["gemma-3", "gpt-oss", "mistral-window"]
"""Families of models. All layers of the last one have a window."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def narrow_windows() -> Iterator[None]:
    with narrow(SLACK):
        yield


@pytest.mark.parametrize(
    "how", [{}, *slow({"kv_dtype": "int8"}, {"lower_tiers": "int8"})], ids=["same", "int8 KV", "int8"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_narrow_windows_give_the_texts_of_whole_kv(home: Path, name: str, how: dict[str, str]) -> None:
    """A batch has rows of different lengths, some with the same prompt, in every mode."""
    model = llm(home, name, **how)
    lengths = (40, 150, 400)
    expected_texts = {length: [completion.token_ids for completion in plain(model, length)] for length in lengths}
    for mode in MODES:
        model.reset_prefix_cache()
        outputs = model.generate([prompt(length) for length in lengths], ask(max_tokens=TOKENS, n=2), mode=mode)
        for length, output in zip(lengths, outputs, strict=True):
            assert [completion.token_ids for completion in output.outputs] == expected_texts[length]


@pytest.mark.parametrize("policy", ["mean_key", "quest"])
def test_narrow_windows_select_as_whole_kv_does(home: Path, policy: str) -> None:
    model = llm(home, PLAYED, retrieval_policy=policy)
    expected_outputs = plain(model, 400, "retrieval")
    check_same(alone.__wrapped__(model, 400, mode="retrieval"), expected_outputs)


def check_schedules(model: LLM) -> None:
    """Check rows that come, leave, share prefixes, and are swapped out and in."""
    for length, tokens in ((91, TOKENS), (150, TOKENS), (260, TOKENS), (150, LATE)):
        plain(model, length, "triforce", tokens)
    play(model, "triforce")
    play_swapped(model, "triforce")


def check_branches(model: LLM) -> None:
    """Check questions about a document whose windows other texts evict; its other pages stay."""
    engine = model.open(1, 2400)
    document = prompt(260)
    unrelated_prompts = [(ids(300, seed=seed), 0) for seed in (20, 21, 22)]
    asked = [
        (document + ids(question_tokens, seed=question_tokens), cached)
        for question_tokens, cached in ((30, 0), (200, 256), (20, 0), (200, 256))
    ]
    for text, cached in (*asked[:2], *unrelated_prompts, *asked[2:]):
        branch_request = model.request(text, ask(), "triforce")
        engine.submit([branch_request])
        output = finish(engine)[branch_request]
        with whole():
            expected_output = model.generate(text, ask(), mode="ar")[0]
            model.reset_prefix_cache()
        assert output.outputs[0].token_ids == expected_output.outputs[0].token_ids
        assert branch_request.groups[0].cached_prompt_tokens == cached
    check_empty(engine)


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
    expected_outputs = {length: [plain(model, length)[0]] for length in (150, 260, 400)}
    engine = model.open(1, CONTEXT, turn=3)
    requests = [request(model, length, "retrieval") for length in expected_outputs]
    engine.submit(requests)
    for finished_request, output in finish(engine).items():
        assert [output.outputs[0].token_ids] == [
            completion.token_ids for completion in expected_outputs[len(finished_request.prompt)]
        ]
    check_empty(engine)


def test_narrow_windows_hold_fewer_bytes(home: Path) -> None:
    model = llm(home, PLAYED)
    engine = model.open(1, CONTEXT)
    long_request = request(model, 400)
    engine.submit([long_request])
    peak_pages = 0
    while engine.busy:
        engine.step()
        if windows := engine.core.store.pool.windows:
            peak_pages = max(peak_pages, windows.allocator.pages - len(windows.allocator.free))
    pool = engine.core.store.pool
    assert (
        pool.windows
        and 0 < peak_pages <= pool.windows.allocator.pages == 2 * pool.windows.max_pages < pool.allocator.pages / 2
    )
    with whole():
        everything = model.open(1, CONTEXT).core.store.pool
    layers = len(pool.uses_window_pages)
    windowed = pool.uses_window_pages.count(True)
    assert everything.bytes.device_bytes == everything.token_bytes * (pool.allocator.pages + 1) * 16
    saved = (pool.allocator.pages - pool.windows.allocator.pages) * 16 * pool.token_bytes * windowed // layers
    assert pool.bytes.device_bytes == everything.bytes.device_bytes - saved
    check_empty(engine)


def test_narrow_windows_memory_is_free_with_its_last_owner(home: Path) -> None:
    """KV is large, so it must be freed without a collection of cycles."""
    model = llm(home, PLAYED)
    gc.collect()
    gc.disable()
    try:
        engine = model.open(1, CONTEXT)
        engine.submit([request(model, 91)])
        finish(engine)
        pool = ref(engine.core.store.pool)
        del engine
        assert pool() is None
    finally:
        gc.enable()
