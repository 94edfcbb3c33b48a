"""The disk cache with faults and mismatches: texts stay right, and the log has one line."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cache_folders import store_in
from tests.helpers.disk_llm import HOW, PROMPT, WHOLE, answer, started, written
from tests.helpers.extras import needs_torch
from tests.helpers.tiny_llm import ask, ids, llm
from triforce.backends import dispatch
from triforce.disk_cache import prefixes
from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.prefixes import SEGMENT, DiskPrefixes
from triforce.errors import CacheError
from triforce.kvcache import PAGE
from triforce.llm import LLM


def segments(cache: Path) -> list[Path]:
    """Return the entries that hold KV."""
    store = store_in(cache)
    return [cache / e.name for e in store.entries() if (store.facts(e.name) or {}).get("kind") == "kv"]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "none readable"])
def test_damaged_segment_gives_right_text(
    disk_pair: Path, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer(started(disk_pair, cache), PROMPT, "ar")
    files = sorted(segments(cache), key=lambda file: -file.stat().st_mtime_ns)
    assert len(files) == 2
    for file in files if damage == "none readable" else files[1:]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(data[:-100] if damage == "cut" else data)
    output = answer(started(disk_pair, cache), PROMPT, "ar")
    assert output.cached_tokens == (0 if damage == "none readable" else SEGMENT)
    assert output.outputs[0].token_ids == answer(llm(disk_pair), PROMPT, "ar").outputs[0].token_ids
    assert len(caplog.records) == {"gone": 0, "none readable": 2}.get(damage, 1), "each is told once"
    assert answer(started(disk_pair, cache), PROMPT, "ar").cached_tokens == WHOLE, "they were written again"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_full_disk_costs_no_answer(
    disk_pair: Path, cache: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(EntryStore, "write", fail)
        output = answer(started(disk_pair, cache), PROMPT)
    assert output.outputs[0].token_ids == answer(llm(disk_pair), PROMPT).outputs[0].token_ids
    assert 1 <= len(caplog.records) <= 3 and os.strerror(code) in caplog.text, "for prompt, answer and latest texts"


@pytest.mark.parametrize("difference", ["level", pytest.param("torch", marks=needs_torch), "dtype", "draft only"])
def test_other_kernels_or_models_find_nothing(
    disk_pair: Path, cache: Path, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = dispatch.native
    if native is None or len(native.levels()) == 1:
        pytest.skip("there are no other kernels here")
    answer(started(disk_pair, cache, dtype="bfloat16"), PROMPT)
    level = native.level()
    if difference == "torch":
        monkeypatch.setattr(dispatch, "native", None)
    elif difference == "level":
        native.use(native.levels()[0])
    try:
        if difference == "draft only":
            model = LLM(disk_pair / "draft", None, disk_cache=cache, dtype="bfloat16")
            assert answer(model, PROMPT, "ar").cached_tokens == 0
        else:
            model = started(disk_pair, cache, dtype="float32" if difference == "dtype" else "bfloat16")
            assert answer(model, PROMPT).cached_tokens == 0
    finally:
        native.use(level)


@needs_torch
@pytest.mark.parametrize("where", ["on disk", "in memory", "in a file"])
def test_paths_that_are_not_bitwise_say_distribution(
    disk_pair: Path, cache: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's KV is restored from disk, memory or a file."""
    file = cache.with_name("kv")
    monkeypatch.setattr(dispatch, "native", None)
    model = LLM(disk_pair / "target", disk_pair / "draft", **HOW)
    if where == "on disk":
        read, restored = (answer(started(disk_pair, cache), PROMPT, "ar") for _ in range(2))
    elif where == "in memory":
        read, restored = (model.generate(PROMPT, ask(), mode="ar")[0] for _ in range(2))
    else:
        (read,) = model.generate(PROMPT, ask(), mode="ar", save_cache=file)
        (restored,) = model.generate(PROMPT, ask(), mode="ar", load_cache=file)
    assert (read.exactness, read.cached_tokens) == ("bitwise", 0)
    assert restored.exactness == "distribution" and restored.cached_tokens > SEGMENT


def test_saved_prompt_of_another_build_is_refused(
    disk_pair: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its bits would enter the disk cache under the fingerprint of this build."""
    file = cache.with_name("kv")
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "build_identity", lambda: "another build")
        llm(disk_pair).generate(PROMPT, ask(), mode="ar", save_cache=file)
    with pytest.raises(CacheError, match="other kernels"):
        started(disk_pair, cache).generate(PROMPT, ask(), mode="ar", load_cache=file)


def test_text_that_is_stopped_leaves_what_it_said(disk_pair: Path, cache: Path) -> None:
    model = started(disk_pair, cache)
    prompt = ids(500)
    engine = model.open(1, 640)
    request = model.request(prompt, ask(max_tokens=60), "ar")
    engine.submit([request])
    while len(request.sequences[0].tokens) < 40:
        engine.step()
    generated_ids = list(request.sequences[0].tokens)
    engine.cancel(request)
    engine.core.write_behind(lambda: False)
    written(model)
    turn = [*prompt, *generated_ids, *ids(40, seed=1)]
    again = answer(started(disk_pair, cache), turn, "ar")
    assert again.cached_tokens == (len(prompt) + len(generated_ids) - 1) // PAGE * PAGE > len(prompt)
    assert again.outputs[0].token_ids == answer(llm(disk_pair), turn, "ar").outputs[0].token_ids
    engine.close()


def test_copies_that_cannot_be_made_cost_no_answer(
    disk_pair: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(DiskPrefixes, "_read", fail)
    output = answer(started(disk_pair, cache), PROMPT)
    assert output.outputs[0].token_ids == answer(llm(disk_pair), PROMPT).outputs[0].token_ids
    assert "no room for a copy" in caplog.text and not segments(cache)


def test_segments_behind_a_lost_one_are_not_kept(disk_pair: Path, cache: Path) -> None:
    """No lookup would find a segment without the one before it."""
    model = started(disk_pair, cache)
    engine = model.open(1, 640)
    request = model.request(PROMPT, ask(), "ar")
    engine.submit([request])
    while not request.sequences[0].tokens:
        engine.step()
    assert engine.core.disk
    engine.core.disk.drop_pending()
    written(model)
    segment_files = segments(cache)
    engine.finish(request)
    engine.core.write_behind(lambda: False)
    written(model)
    assert segments(cache) == segment_files
    engine.close()


def test_pages_that_are_needed_are_not_waited_for(disk_pair: Path, cache: Path) -> None:
    """Pending writes hold no pages: they are dropped when another text takes the pages."""
    model = started(disk_pair, cache)
    engine = model.open(1, 640)
    for prompt in (PROMPT, ids(590, seed=3)):
        request = model.request(prompt, ask(max_tokens=1), "ar")
        engine.submit([request])
        engine.finish(request)
        assert engine.core.disk
        engine.core.disk._pause_until = float("inf")  # nothing is written between steps
    engine.core.write_behind(lambda: False)
    written(model)
    assert answer(started(disk_pair, cache), ids(590, seed=3), "ar").cached_tokens == WHOLE
    engine.close()


@pytest.mark.parametrize("how", ["cancelled", "given up by its caller"])
def test_text_given_up_in_the_middle_is_shared_in_memory(disk_pair: Path, how: str) -> None:
    engine, progress = llm(disk_pair).open(1, 640, max_itl=0.0), list[int]()  # a pass at a time

    def report(done: int, _: int) -> None:
        progress.append(done)
        if how != "cancelled" and done >= 256:
            raise RuntimeError("enough")

    request = llm(disk_pair).request(PROMPT, ask(), "ar")
    engine.submit([request], on_prefill=report)
    while engine.busy and (not progress or progress[-1] < 256):
        engine.step()
    engine.cancel(request)
    assert engine.core.kv_tokens == 0 and progress[-1] < len(PROMPT) - 1
    again = llm(disk_pair).request(PROMPT, ask(), "ar")
    engine.submit([again])
    output = engine.finish(again)
    assert output.cached_tokens == progress[-1] // PAGE * PAGE > 0
    assert output.outputs[0].token_ids == answer(llm(disk_pair), PROMPT, "ar").outputs[0].token_ids
    engine.close()


@pytest.mark.parametrize("killed", [False, True])
def test_text_given_up_in_the_middle_leaves_what_was_read(
    disk_pair: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """A request is cancelled, or a process is killed some segments earlier."""
    monkeypatch.setattr(prefixes, "BATCH_SEGMENTS", 2)
    model = started(disk_pair, cache)
    engine = model.open(1, 640)
    request = model.request(PROMPT, ask(), "ar")
    engine.submit([request])
    while int(engine.core.kv_tokens) < 512:
        engine.step()
    if not killed:
        engine.cancel(request)
    engine.core.write_behind(lambda: False)
    written(model)
    assert answer(started(disk_pair, cache), PROMPT, "ar").cached_tokens == WHOLE
    engine.close()
