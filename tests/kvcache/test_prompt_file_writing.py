"""Saving a prompt: a failed save leaves no file behind."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.saved_prompt import MAKER, PROMPT, loaded
from tests.helpers.small_decoder import VOCAB, make_pool, prefill, small_decoder, text
from tests.helpers.tiny_llm import ask, counted, llm
from triforce.disk_cache import prompt_file
from triforce.errors import CacheError
from triforce.kvcache import FullView
from triforce.ragged import ints

torch.set_num_threads(1)


def a_row() -> tuple[FullView, list[int]]:
    decoder = small_decoder(dtype="float32")
    prompt = text(40)
    full = FullView(make_pool(decoder, 1, 48))
    prefill(decoder, full, 0, prompt)
    assert max(prompt) < VOCAB
    return full, prompt


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_saved_file_is_private(tmp_path: Path, umask: int) -> None:
    """A prompt may be private: its file is so under any umask, and over any earlier file."""
    (tmp_path / "kv").write_text("old")
    (tmp_path / "kv").chmod(0o666)
    previous_umask = os.umask(umask)
    try:
        prompt_file.save(tmp_path / "kv", MAKER, *mixed(a_row()))
    finally:
        os.umask(previous_umask)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def mixed(row: tuple[FullView, list[int]]) -> tuple[FullView, int, list[int]]:
    return row[0], 0, row[1]


class Disk:
    """A file that takes `room` bytes and then fails."""

    def __init__(self, file: Any, room: int, failure: BaseException) -> None:
        self.file = file
        self.room = room
        self.failure = failure

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: bytes | memoryview) -> int:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise self.failure
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def full_disk(patch: pytest.MonkeyPatch, room: int, failure: BaseException) -> None:
    patch.setattr(prompt_file, "open", lambda *args: Disk(open(*args), room, failure), raising=False)  # noqa: SIM115


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", [0, 100, 2000, 10_000])
@pytest.mark.parametrize(
    "failure", [NO_SPACE, OSError(errno.EIO, "broken"), KeyboardInterrupt(), MemoryError()], ids=repr
)
def test_failed_write_keeps_old_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, failure: BaseException
) -> None:
    path, (full, prompt) = tmp_path / "kv", a_row()
    prompt_file.save(path, MAKER, full, 0, prompt[:20])
    old = path.read_bytes()
    full_disk(monkeypatch, room, failure)
    with pytest.raises(CacheError if isinstance(failure, OSError) else type(failure)) as caught:
        prompt_file.save(path, MAKER, full, 0, prompt)
    if failure is NO_SPACE:
        assert "No space left" in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["kv"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_before_rename_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise NO_SPACE

    full, prompt = a_row()
    (tmp_path / "kv").write_text("old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CacheError):
        prompt_file.save(tmp_path / "kv", MAKER, full, 0, prompt)
    assert (tmp_path / "kv").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["kv"]


def test_unwritable_path_raises(pair: Path, tmp_path: Path) -> None:
    """The error is raised before the prefill, and by `save` itself."""
    full, prompt = a_row()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "missing" / "kv", tmp_path / "file" / "kv"):
        with pytest.raises(CacheError, match=path.name):
            prompt_file.save(path, MAKER, full, 0, prompt)
        model = llm(pair)
        with counted(model.models.target) as passes, pytest.raises(CacheError, match="cannot write"):
            model.generate(PROMPT, ask(), save_cache=path)
        assert not passes
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_reserved_space_is_released_without_trace(tmp_path: Path) -> None:
    size = 8 << 20
    sizes = list[int]()

    def allocate(file: int, offset: int, length: int) -> None:
        sizes.append(length)
        plain(file, offset, length)
        assert os.fstat(file).st_size == size and os.fstat(file).st_blocks * 512 >= size

    plain = os.posix_fallocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        room = prompt_file.reserve(tmp_path / "kv", size)
    room.close()
    assert sizes == [size] and not list(tmp_path.iterdir())


def test_full_disk_is_reported_before_prefill(pair: Path, tmp_path: Path) -> None:
    """`size_of` returns more bytes than any disk has."""
    model = llm(pair)
    with pytest.MonkeyPatch.context() as patch, counted(model.models.target) as passes:
        patch.setattr(prompt_file, "size_of", lambda *_: 1 << 60)
        with pytest.raises(CacheError, match=r"cannot write .* MiB to spare"):
            model.generate(PROMPT, ask(), save_cache=tmp_path / "kv")
    assert not passes and not list(tmp_path.iterdir())


def test_full_disk_during_generation_keeps_text(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(pair)
    (expected_output,) = model.generate(PROMPT, ask())

    def fail(_: object) -> None:
        raise NO_SPACE

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.warns(RuntimeWarning, match="cannot write the KV cache"):
        (output,) = model.generate(PROMPT, ask(), save_cache=tmp_path / "kv")
    assert output.outputs[0].token_ids == expected_output.outputs[0].token_ids and not list(tmp_path.iterdir())


def test_unverified_tokens_are_not_saved(tmp_path: Path) -> None:
    """Uncommitted tokens are not saved, even if a longer text is named."""
    full, prompt = a_row()
    full.rewind(ints([25]))
    prompt_file.save(tmp_path / "kv", MAKER, full, 0, prompt)
    assert loaded(tmp_path / "kv").ids == prompt[:25]
