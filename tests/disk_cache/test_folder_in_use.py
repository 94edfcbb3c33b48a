"""Locks that are never released, and folders that are deleted while they are in use."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.cache_folders import present, store_in, write
from triforce.cli import main
from triforce.disk_cache import folder as folder_module
from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.write_queue import DiskCache
from triforce.errors import CacheError


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextmanager
def locked_by_another(cache: Path) -> Iterator[None]:
    """Yield while another opening of the file holds the folder's lock."""
    descriptor = os.open(cache / "state", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


@pytest.fixture
def short_lock_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LOCK_SECONDS", 0.05)


@pytest.mark.usefixtures("short_lock_wait")
def test_lock_of_another_costs_one_line_and_no_reads(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (name,) = write(store_in(cache), 1, 1)
    with locked_by_another(cache):
        disk = DiskCache(cache, 1 << 20)
        assert disk.store.read(name) is not None
        for text in range(2, 5):
            disk.queue.offer(lambda text=text: write(disk.store, text, 1) and None, 1)  # type: ignore[misc]
            assert disk.queue.flush()
        assert len(caplog.records) == 1 and f"{cache} is locked by another process" in caplog.text
    disk.queue.offer(lambda: write(disk.store, 5, 1) and None, 1)
    assert disk.queue.flush() and present(disk.store, [disk.store.name(b"5", b"0")]) == [True]
    disk.close()


@pytest.mark.usefixtures("short_lock_wait")
@pytest.mark.parametrize("command", ["list", "verify", "clear"])
def test_cache_command_tells_of_a_lock(cache: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(store_in(cache), 1, 1)
    with locked_by_another(cache):
        assert main(["cache", command, str(cache)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "is locked by another process" in captured.err


@pytest.mark.usefixtures("short_lock_wait")
@pytest.mark.parametrize("secret", [None, b"damaged"], ids=["new", "damaged"])
def test_folder_without_a_secret_that_another_holds_costs_one_line(
    cache: Path, secret: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder with a secret costs one line, too. It is used once it is free, under the secret of its first holder."""
    store_in(cache).folder.close()
    (cache / "secret").unlink()
    if secret:
        (cache / "secret").write_bytes(secret)
        (cache / "secret").chmod(0o600)
    with locked_by_another(cache):
        disk = DiskCache(cache, 1 << 20)
        assert not any(offer_entries(disk, 1)) and not any(offer_entries(disk, 2))
        assert len(caplog.records) == 1 and f"{cache} is locked by another process" in caplog.text
        if secret:
            with pytest.raises(CacheError, match="is locked by another process"):
                CacheFolder(cache, create=False)
    second_store = store_in(cache)
    assert not any(offer_entries(disk, 3)) and "was locked when it was opened, and is used from now on" in caplog.text
    assert all(offer_entries(disk, 4)) and disk.store.folder.secret == second_store.folder.secret
    disk.close()


def offer_entries(disk: DiskCache, text: int) -> list[bool]:
    """Return whether a text's entries are present after they were queued and written."""
    disk.queue.offer(lambda: write(disk.store, text, 2) and None, 1)
    assert disk.queue.flush()
    return present(disk.store, [disk.store.name(b"%d" % text, b"%d" % index) for index in range(2)])


@pytest.mark.parametrize("contents", [False, True], ids=["folder", "contents"])
def test_folder_deleted_in_use_is_told_once_and_made_anew(
    cache: Path, contents: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskCache(cache, 1 << 20)
    assert all(offer_entries(disk, 1))
    for file in cache.iterdir():
        file.unlink()
    if not contents:
        cache.rmdir()
    assert disk.store.read(disk.store.name(b"1", b"0")) is None
    assert not any(offer_entries(disk, 2))
    assert all(offer_entries(disk, 3)) and all(offer_entries(disk, 4))
    assert len(caplog.records) == 1 and f"{cache} was deleted, and is made anew" in caplog.text
    assert cache.stat().st_mode & 0o777 == 0o700
    second_store = store_in(cache)
    assert second_store.folder.secret == disk.store.folder.secret and len(second_store.entries()) == 4
    disk.close()


def test_folder_that_cannot_be_made_anew_is_told_once(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "in").mkdir(parents=True)
    disk, opened = DiskCache(cache / "in" / "cache", 1 << 20), len(os.listdir("/proc/self/fd"))
    offer_entries(disk, 1)
    shutil.rmtree(cache)
    assert not any(offer_entries(disk, text)[0] for text in range(2, 5))
    assert len(caplog.records) == 1 and "cannot be a disk cache" in caplog.text
    (cache / "in").mkdir(parents=True)
    assert not any(offer_entries(disk, 5)) and all(offer_entries(disk, 6))
    assert len(os.listdir("/proc/self/fd")) == opened
    disk.close()


def test_folder_of_others_in_the_place_of_a_deleted_one_is_not_taken(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskCache(cache, 1 << 20)
    offer_entries(disk, 1)
    shutil.rmtree(cache)
    cache.mkdir(mode=0o700)
    (cache / "letter.txt").write_text("dear")
    assert not any(offer_entries(disk, 2)) and not any(offer_entries(disk, 3))
    assert os.listdir(cache) == ["letter.txt"] and len(caplog.records) == 1
    disk.close()


def test_lost_state_is_made_anew_in_silence(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(cache)
    names = write(store, 1, 2)
    (cache / "state").unlink()
    assert all(present(store, names + write(store, 2, 2))) and not caplog.records
    with locked_by_another(cache), pytest.raises(OSError, match="locked"):
        store.folder._patience = 0.0
        store.entries()
