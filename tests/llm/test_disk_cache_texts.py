"""Texts that start from the disk cache are those that read their prompts, bit for bit, in every mode."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.disk_llm import HOW, PROMPT, WHOLE, answer, check_restored, started, written
from tests.helpers.tiny_llm import MODES, ask, checkpoints, counted, ids, llm
from triforce.backends import native_loader
from triforce.disk_cache.entry_store import EntryStore
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import disk_text
from triforce.kvcache.disk_prefixes import SEGMENT
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM
from triforce.session import Session

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Here the draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes no time, however busy this machine is."""
    monkeypatch.setattr(disk_text, "perf_counter", lambda: 0.0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("coupling", ["seeded", "rejection"])
@pytest.mark.parametrize("mode", MODES)
def test_restored_text_equals_fresh_one(folder: Path, cache: Path, mode: str, coupling: str) -> None:
    if (mode, coupling) == ("auto", "rejection"):
        pytest.skip("the clock has a say in its text")
    check_restored(folder, cache, mode, coupling)


@pytest.mark.parametrize(
    "how", [dict(lower_tiers="int8"), dict(kv_offload="host"), dict(kv_offload="file"), dict(strict=True)], ids=str
)
def test_restored_text_equals_fresh_one_with_setting(folder: Path, cache: Path, how: dict[str, Any]) -> None:
    check_restored(folder, cache, "triforce", **how)


@pytest.mark.parametrize("policy", ["mean_key", "quest"])
def test_restored_text_equals_fresh_one_by_policy(folder: Path, cache: Path, policy: str) -> None:
    check_restored(folder, cache, "retrieval", "rejection", retrieval_policy=policy)


def test_only_what_is_not_on_disk_is_fed(folder: Path, cache: Path) -> None:
    answer(started(folder, cache), PROMPT)
    model = started(folder, cache)
    with counted(model.models.target) as target, counted(model.models.draft) as draft:  # type: ignore[arg-type]
        answer(model, PROMPT, max_tokens=1)
    assert target[:2] == [len(PROMPT) - WHOLE - 1 - TAIL, TAIL]
    assert draft[0] == len(PROMPT) - WHOLE - 1, "its window came from disk, too"


def test_next_turn_finds_generated_tokens(folder: Path, cache: Path) -> None:
    prompt = ids(500)
    said = answer(started(folder, cache), prompt).outputs[0].token_ids
    turn = [*prompt, *said, *ids(40, seed=1)]
    again = answer(started(folder, cache), turn)
    assert again.cached_tokens == 512 > len(prompt)
    assert again.outputs[0].token_ids == answer(llm(folder), turn).outputs[0].token_ids


@pytest.mark.parametrize(("length", "cached"), [(200, 0), (SEGMENT, 0), (SEGMENT + TAIL, 0), (SEGMENT + TAIL + 1, 256)])
def test_prompt_begins_with_whole_segments_of_longer_one(folder: Path, cache: Path, length: int, cached: int) -> None:
    answer(started(folder, cache), PROMPT)
    output = answer(started(folder, cache), PROMPT[:length])
    assert output.cached_tokens == cached
    assert output.outputs[0].token_ids == answer(llm(folder), PROMPT[:length]).outputs[0].token_ids


def test_short_text_is_not_kept(folder: Path, cache: Path) -> None:
    answer(started(folder, cache), PROMPT[:400])
    assert not list(cache.glob("*.kv"))


def test_choices_start_from_disk_together(folder: Path, cache: Path) -> None:
    answer(started(folder, cache), PROMPT)
    output, fresh = (answer(model, PROMPT, n=3) for model in (started(folder, cache), llm(folder)))
    assert output.cached_tokens == WHOLE
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in fresh.outputs]


def test_scored_prompt_is_read(folder: Path, cache: Path) -> None:
    answer(started(folder, cache), PROMPT)
    output = answer(started(folder, cache), PROMPT, prompt_logprobs=0, max_tokens=1)
    assert output.cached_tokens == 0 and len(output.prompt_logprobs) == len(PROMPT)


def test_session_goes_on_after_restart(folder: Path, cache: Path) -> None:
    def turns(model: LLM, conversation: list[int]) -> tuple[list[int], list[int]]:
        session, cached = Session(model), []
        for number in range(2):
            *_, output = session.ask(conversation, ask(max_tokens=16))
            assert isinstance(output, RequestOutput)
            cached.append(output.cached_tokens)
            conversation = conversation + output.outputs[0].token_ids + ids(7, seed=number)
        return conversation, cached

    plain, _ = turns(LLM(folder / "target", folder / "draft", **HOW), PROMPT[:530])
    first, again = started(folder, cache), started(folder, cache)
    assert turns(first, PROMPT[:530])[0] == plain
    written(first)
    conversation, cached = turns(again, PROMPT[:530])
    assert conversation == plain and cached[0] == 512


def test_generate_and_stream_keep_prompts(folder: Path, cache: Path) -> None:
    with_disk = started(folder, cache)
    with_disk.generate(PROMPT, ask())
    written(with_disk)
    *_, output = started(folder, cache).stream(PROMPT, ask())
    assert isinstance(output, RequestOutput) and output.cached_tokens == WHOLE


def test_engines_that_run_take_each_others_texts(folder: Path, cache: Path) -> None:
    """Two processes that both run already."""
    one, other = started(folder, cache), started(folder, cache)
    answer(other, ids(100, seed=5))
    answer(one, PROMPT)
    assert answer(other, PROMPT).cached_tokens == WHOLE


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "none readable"])
def test_damaged_segment_gives_right_text(
    folder: Path, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer(started(folder, cache), PROMPT, "ar")
    files = sorted(cache.glob("*.kv"), key=lambda file: -file.stat().st_mtime_ns)
    assert len(files) == 2
    for file in files if damage == "none readable" else files[1:]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(data[:-100] if damage == "cut" else data)
    output = answer(started(folder, cache), PROMPT, "ar")
    assert output.cached_tokens == (0 if damage == "none readable" else SEGMENT)
    assert output.outputs[0].token_ids == answer(llm(folder), PROMPT, "ar").outputs[0].token_ids
    assert len(caplog.records) == (damage != "gone")
    if damage == "none readable":  # the second is found out once the first is there again
        answer(started(folder, cache), PROMPT, "ar")
    assert answer(started(folder, cache), PROMPT, "ar").cached_tokens == WHOLE, "they were written again"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_full_disk_costs_no_answer(
    folder: Path, cache: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(EntryStore, "write", fail)
        output = answer(started(folder, cache), PROMPT)
    assert output.outputs[0].token_ids == answer(llm(folder), PROMPT).outputs[0].token_ids
    assert 1 <= len(caplog.records) <= 2 and os.strerror(code) in caplog.text, "for the prompt, and for the answer"


def test_reading_slower_than_prefill_ends(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(started(folder, cache), PROMPT)
    ticks: Iterator[int] = iter(range(10**6))
    monkeypatch.setattr(disk_text, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(disk_text, "GRACE", 0.0)
    output = answer(started(folder, cache), PROMPT)
    assert output.cached_tokens == SEGMENT, "the first one told"
    assert output.outputs[0].token_ids == answer(llm(folder), PROMPT).outputs[0].token_ids


@pytest.mark.parametrize("other", ["level", "torch", "dtype", "draft only"])
def test_other_kernels_or_models_find_nothing(
    folder: Path, cache: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = native_loader.native
    if native is None or len(native.levels()) == 1:
        pytest.skip("there are no other kernels here")
    answer(started(folder, cache, dtype="bfloat16"), PROMPT)
    level = native.level()
    if other == "torch":
        monkeypatch.setattr(native_loader, "native", None)
    elif other == "level":
        native.use(native.levels()[0])
    try:
        if other == "draft only":
            model = LLM(folder / "draft", None, disk_cache=cache, dtype="bfloat16")
            assert answer(model, PROMPT, "ar").cached_tokens == 0
        else:
            model = started(folder, cache, dtype="float32" if other == "dtype" else "bfloat16")
            assert answer(model, PROMPT).cached_tokens == 0
    finally:
        native.use(level)


def test_paths_that_are_not_bitwise_say_distribution(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_loader, "native", None)
    read = answer(started(folder, cache), PROMPT, "ar")
    restored = answer(started(folder, cache), PROMPT, "ar")
    assert (read.exactness, read.cached_tokens) == ("bitwise", 0)
    assert (restored.exactness, restored.cached_tokens) == ("distribution", WHOLE)


def test_pages_that_are_needed_are_not_waited_for(folder: Path, cache: Path) -> None:
    """What waits to be written holds no page: it is dropped when another text takes them."""
    model = started(folder, cache)
    engine = model.open(1, 640)
    for prompt in (PROMPT, ids(590, seed=3)):
        request = model.request(prompt, ask(max_tokens=1), "ar")
        engine.submit([request])
        engine.finish(request)
        assert engine.core.disk
        engine.core.disk._pause_until = float("inf")  # nothing is written between steps
    engine.core.write_behind(lambda: False)
    written(model)
    assert answer(started(folder, cache), ids(590, seed=3), "ar").cached_tokens == WHOLE
    engine.close()


def test_text_given_up_in_the_middle_leaves_what_was_read(folder: Path, cache: Path) -> None:
    model = started(folder, cache)
    engine = model.open(1, 640)
    request = model.request(PROMPT, ask(), "ar")
    engine.submit([request])
    while int(engine.core.kv_tokens) < 512:
        engine.step()
    engine.cancel(request)
    engine.core.write_behind(lambda: False)
    written(model)
    engine.close()
    assert answer(started(folder, cache), PROMPT, "ar").cached_tokens == 512
