"""Files of a cache that are larger than they claim, or are no entries."""

from __future__ import annotations

import os
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cache_folders import present, store_in, write
from triforce.cli import main
from triforce.disk_cache import documents
from triforce.disk_cache.documents import WatchedFolder
from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.folder import MOST_ORDER, sealed

LARGE = 8 << 30


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def bounded() -> Iterator[None]:
    """Check that peak memory grows by less than 64 MiB."""
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 64 << 10  # KiB


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("size", [1 << 30, LARGE])
def test_entry_of_gigabytes_is_told_once_and_rebuilt(cache: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(cache, limit=1 << 62)
    (name,) = write(store, 1, 1)
    os.truncate(cache / name, size)
    assert store.read(name) is None and store.read(name) is None
    assert len(caplog.records) == 1 and "its size is not that of its header" in caplog.text
    assert present(store, write(store, 1, 1)) == [True] and store.read(name) is not None


@pytest.mark.usefixtures("bounded")
def test_verify_refuses_entry_of_gigabytes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = write(store_in(cache), 1, 3)
    os.truncate(cache / names[1], LARGE)
    assert main(["cache", "verify", str(cache)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "3 entries were checked, 1 of them was damaged\n" and captured.err.count("\n") == 1
    assert main(["cache", "verify", str(cache)]) == 0


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", ["secret", "state", "manifest"])
def test_file_of_gigabytes_is_rebuilt(cache: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(cache)
    documents.record_folder(store.folder, WatchedFolder(cache, False, []))
    os.truncate(cache / name, LARGE)
    again = store_in(cache)
    assert len(caplog.records) == (name == "secret")
    assert len(documents.watched_folders(again.folder)) == (name != "manifest")
    documents.record_folder(again.folder, WatchedFolder(cache, False, []))
    assert all(present(again, write(again, 1, 2))) and len(documents.watched_folders(again.folder)) == 1


def test_entry_beyond_the_limit_goes_before_others(cache: Path) -> None:
    """The large entry goes first although it was used last."""
    store = store_in(cache, limit=20_000)
    names = write(store, 1, 4)
    os.truncate(cache / names[3], 1 << 40)
    assert all(present(store_in(cache, limit=20_000), write(store_in(cache, limit=20_000), 2, 1)))
    assert present(store, names) == [True, True, True, False]


@pytest.mark.parametrize("order", [MOST_ORDER + 1, (1 << 64) - 1])
def test_order_of_another_age_is_no_order(cache: Path, order: int) -> None:
    """The bad order stands in a state with a valid checksum, and in an entry's time."""
    write(store_in(cache), 1, 2)
    (cache / "state").write_bytes(sealed(struct.pack("<QQ", order, 1)))
    os.utime(next(cache.glob("*.kv")), ns=(0, (MOST_ORDER + 1) * 10**9))
    store = store_in(cache)
    names = write(store, 2, 1)
    assert all(present(store, names)) and 0 < store.folder.place(names[0]) < 10 * 10**9


def test_lost_secret_costs_what_was_kept_under_it(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(store_in(cache), 1, 3)
    (cache / "secret").unlink()
    store = store_in(cache)
    assert store.entries() == [] and len(caplog.records) == 1 and "secret" in caplog.text
    assert all(present(store, write(store, 1, 3)))


def folders_for_entries(store: EntryStore, cache: Path, names: list[str]) -> None:
    """Non-empty folders replace the first two entries, and a name with escapes joins them."""
    for name in names[:2]:
        (cache / name).unlink()
        (cache / name / "inner").mkdir(parents=True)
    (cache / "\x1b[31m\n.kv").mkdir()
    (cache / "\x1b[31m\n.kv" / "inner").write_text("")


def test_verify_and_clear_go_on_behind_what_they_cannot_remove(
    cache: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(cache)
    names = write(store, 1, 4)
    folders_for_entries(store, cache, names)
    (cache / names[3]).write_bytes(b"short")
    (cache / "manifest").mkdir()
    assert main(["cache", "verify", str(cache)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "5 entries were checked, 1 of them was damaged; 3 are left\n"
    assert captured.err.count("\n") == 4 and captured.err.isascii() and "\x1b" not in captured.err
    assert store.read(names[0]) is None and store.read(names[0]) is None and len(caplog.records) == 1
    assert main(["cache", "clear", str(cache)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "removed 1 entry, 0 MiB; 4 are left\n" and captured.err.count("is left\n") == 4
    assert not (cache / names[2]).exists()
    for name in (*names[:2], "manifest", "\x1b[31m\n.kv"):
        shutil.rmtree(cache / name)
    assert main(["cache", "clear", str(cache)]) == 0


def test_entry_that_memory_is_too_small_for_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(cache)
    (name,) = write(store, 1, 1)

    def no_memory(self: EntryStore, name: str) -> None:
        raise MemoryError

    monkeypatch.setattr(EntryStore, "_read_checked", no_memory)
    assert store.read(name) is None and "not enough memory" in caplog.text
    assert main(["cache", "verify", str(cache)]) == 1 and "is left" in capsys.readouterr().err
    assert present(store, [name]) == [True]
