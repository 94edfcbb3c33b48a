"""Entries by name: complete or absent for any damage to their files, and within the limit of bytes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import signal
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.helpers.cache_folders import made_entry, present, store_in, write, writer
from triforce.disk_cache.entry_store import EntryStore, Use
from triforce.disk_cache.folder_checks import PARTIAL


def is_complete(store: EntryStore, text: int, name: str, index: int) -> bool:
    """Return whether an entry is the one that `write` wrote. A missing entry gives False; another entry raises."""
    entry = store.read(name)
    if entry is None:
        return False
    written_entry = made_entry(text * 1000 + index, len(entry.parts["keys"].data))
    assert entry.parts["keys"].data == written_entry.parts["keys"].data
    return True


def test_entry_is_found_by_name_in_another_process_view(tmp_path: Path) -> None:
    names = write(store_in(tmp_path / "cache"), 1, 3)
    second_store = store_in(tmp_path / "cache")
    assert [is_complete(second_store, 1, name, index) for index, name in enumerate(names)] == [True] * 3
    assert second_store.read(second_store.name(b"1", b"3")) is None
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (tmp_path / "cache").iterdir())


def test_entries_read_ahead_are_those_of_single_reads(tmp_path: Path) -> None:
    store = store_in(tmp_path / "cache")
    names = write(store, 1, 3)
    requested_names = [names[2], store.name(b"nothing"), names[0]]
    assert list(store.read_ahead(requested_names)) == [store.read(name) for name in requested_names]
    assert list(store.read_ahead([])) == []


def test_next_entry_is_read_while_one_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No entry beyond the next is read: a text that is given up has read one entry in vain."""
    store = store_in(tmp_path / "cache")
    names = write(store, 1, 4)
    started_reads = {name: Event() for name in names}
    read = store.read
    monkeypatch.setattr(store, "read", lambda name: started_reads[name].set() or read(name))
    entries = store.read_ahead(names)
    assert next(entries) is not None
    assert started_reads[names[1]].wait(30)
    entries.close()  # type: ignore[attr-defined]
    assert [started_reads[name].is_set() for name in names] == [True, True, False, False]


def test_names_need_the_secret(tmp_path: Path) -> None:
    store = store_in(tmp_path / "a")
    other_store = store_in(tmp_path / "b")
    assert store.name(b"x") != other_store.name(b"x")
    assert store.name(b"a", b"b") not in {store.name(b"ab"), store.name(b"b", b"a"), store.name(b"a", b"b", b"")}


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_damaged_entry_is_told_once_and_removed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path / "cache")
    name, intact_name = write(store, 1, 2)
    path = tmp_path / "cache" / name
    data = path.read_bytes()
    if damage == "swap":
        path.write_bytes((tmp_path / "cache" / intact_name).read_bytes())
    else:
        path.write_bytes({"flip": data[:300] + b"?" + data[301:], "cut": data[:-1], "empty": b""}[damage])
    assert store.read(name) is None and store.read(name) is None
    assert len(caplog.records) == 1 and name in caplog.text
    assert present(store, [name, intact_name]) == [False, True]


def test_entry_opened_to_others_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path / "cache")
    (name,) = write(store, 1, 1)
    (tmp_path / "cache" / name).chmod(0o644)
    assert store.read(name) is None and store.read(name) is None
    assert len(caplog.records) == 1 and present(store, [name]) == [False]


def test_entry_that_the_disk_cannot_read_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that this process cannot open for now stays."""
    store = store_in(tmp_path / "cache")
    (name,) = write(store, 1, 1)
    for code, entry_stays in ((errno.EMFILE, True), (errno.EIO, False)):
        with monkeypatch.context() as patch:
            patch.setattr(store.folder, "open", lambda _, code=code: raise_error(code))
            assert store.read(name) is None
        assert present(store, [name]) == [entry_stays]
    assert len(caplog.records) == 2


def raise_error(code: int) -> int:
    raise OSError(code, os.strerror(code))


def test_touched_text_outlives_newer_ones(tmp_path: Path) -> None:
    store = store_in(tmp_path / "cache", limit=20_000)
    touched_names = write(store, 1, 4)
    use = Use()
    for index, name in enumerate(touched_names):
        store.touch(name, use, index)
    for text in range(2, 12):
        write(store, text, 4)
    assert present(store, touched_names) == [True] * 4


def test_size_is_kept_by_openings_that_take_turns(tmp_path: Path) -> None:
    stores = [store_in(tmp_path / "cache", limit=20_000) for _ in range(3)]
    for text in range(30):
        write(stores[text % 3], text, 3)
        assert sum(entry.bytes for entry in stores[0].entries()) <= 20_000


def test_state_is_rebuilt_by_scan(tmp_path: Path) -> None:
    write(store_in(tmp_path / "cache"), 1, 3)
    (tmp_path / "cache" / "state").write_bytes(b"")
    store = store_in(tmp_path / "cache")
    names = write(store, 2, 1)
    entries = store.entries()
    with store.folder.locked() as state:
        assert state.bytes == sum(entry.bytes for entry in entries)
    assert store.folder.place(names[0]) > max(entry.place for entry in entries if entry.name not in names)


@pytest.mark.parametrize("at", [None, *range(20)])
def test_damaged_state_is_rebuilt_by_open_store(tmp_path: Path, at: int | None) -> None:
    """Any byte of the state may be changed, or all of them missing."""
    store = store_in(tmp_path / "cache")
    path = tmp_path / "cache" / "state"
    write(store, 1, 3)
    data = bytearray(path.read_bytes())
    if at is None:
        data.clear()
    else:
        data[at] ^= 128
    path.write_bytes(data)
    (name,) = write(store, 2, 1)
    entries = store.entries()
    with store.folder.locked() as state:
        assert state.bytes == sum(entry.bytes for entry in entries) and 0 < state.order < 100
    assert max(entries, key=lambda entry: entry.place).name == name


def test_entry_larger_than_all_is_not_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path / "cache", limit=5000)
    names = write(store, 1, 2)
    with pytest.raises(OSError, match="larger"):
        store.write(store.name(b"large"), made_entry(size=6000), Use(), 0)
    assert present(store, names) == [True, True]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "utime", "ftruncate", "flock"])
def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    store = store_in(tmp_path / "cache")
    names, flock, opened = write(store, 1, 1), fcntl.flock, len(os.listdir("/proc/self/fd"))
    if call == "flock":  # that of the entry
        wrong = store.folder._state
        monkeypatch.setattr(fcntl, call, lambda file, how: flock(file, how) if file == wrong else raise_error(code))
    else:
        monkeypatch.setattr(os, call, lambda *_, **__: raise_error(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        write(store, 2, 1)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == opened
    assert [name for name, _ in store.folder.files()] == names
    assert all(present(store, write(store, 2, 1)))


def test_entry_takes_its_name_while_nobody_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path / "cache")
    names_under_lock = []
    state = os.open(tmp_path / "cache" / "state", os.O_RDWR)
    rename = store.folder.rename

    def watched(name: str, new: str) -> None:
        with pytest.raises(BlockingIOError):
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names_under_lock.append(new)
        rename(name, new)

    monkeypatch.setattr(store.folder, "rename", watched)
    assert write(store, 1, 3) == names_under_lock
    os.close(state)


def record_call(call: Callable[..., None], done: list[str], path: Any, *arguments: Any, **options: Any) -> None:
    """Record a call, and whether it is one of a folder."""
    folder = isinstance(path, int) and stat.S_ISDIR(os.fstat(path).st_mode)
    done.append(f"{call.__name__} the folder" if folder else call.__name__)
    call(path, *arguments, **options)


def test_entry_is_synced_before_its_name_and_the_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power leaves the entry complete, in its place of the order, or absent."""
    store = store_in(tmp_path / "cache")
    done = list[str]()
    for call in ("utime", "fsync", "rename"):
        monkeypatch.setattr(os, call, partial(record_call, getattr(os, call), done))
    write(store, 1, 1)
    assert done == ["utime", "fsync", "rename", "fsync the folder"]


def test_clear_removes_entries_beside_open_store(tmp_path: Path) -> None:
    store = store_in(tmp_path / "cache")
    second_store = store_in(tmp_path / "cache")
    write(store, 1, 3)
    assert second_store.clear()[0] == 3 and store.entries() == []
    assert all(present(store, write(store, 1, 3)))


def test_killed_writers_leave_whole_entries_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two writers are killed at any moment, twenty times, while another process reads."""
    caplog.set_level(logging.WARNING)
    store = store_in(tmp_path / "cache", 400_000)
    draw = random.Random(0)
    limit = 400_000
    for turn in range(10):
        texts = range(turn * 100, turn * 100 + 100)
        processes = [writer(tmp_path / "cache", limit, texts) for _ in range(2)]
        for _ in range(draw.randrange(1, 40)):
            text = draw.choice(texts)
            is_complete(store, text, store.name(b"%d" % text, b"0"), 0)
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    for text in range(1000):
        for index in range(4):
            is_complete(store, text, store.name(b"%d" % text, b"%d" % index), index)
    write(store_in(tmp_path / "cache", limit), 5000, 1)
    assert not caplog.records, "nothing was found damaged"
    assert not [name for name, _ in store.folder.files() if name.endswith(PARTIAL)]
    assert sum(entry.bytes for entry in store.entries()) <= limit
