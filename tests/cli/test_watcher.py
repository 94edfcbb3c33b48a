"""`triforce watch` between two readings: what it notices, and what it reads again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import watched_folder
from tests.helpers.watched_folder import WORDS, asked, kept, write
from triforce.cli import watch
from triforce.cli.watch import Watcher
from triforce.disk_cache import prefixes
from triforce.disk_cache.documents import watched_folders
from triforce.disk_cache.folder import CacheFolder
from triforce.errors import RequestError
from triforce.llm import LLM

folder = watched_folder.folder  # a fixture


@pytest.fixture
def watcher(pair: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.0)
    llm = LLM(pair / "target", None, mode="ar", retrieval_budget="64", disk_cache=folder.with_name("cache"))
    yield Watcher(llm, folder, each=False, silent=True)


def test_change_in_the_middle_begins_anew(
    watcher: Watcher, folder: Path, pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt that is read when a file changes is given up, and the document as it is then is read."""
    reports = list[tuple[int, int]]()
    report = watch.Prefill.__call__

    def changing(self: watch.Prefill, done: int, total: int) -> None:
        reports.append((done, total))
        if len(reports) == 1:
            write(folder / "new.txt", WORDS * 40, 3)
        report(self, done, total)

    monkeypatch.setattr(watch.Prefill, "__call__", changing)
    watcher.read()
    assert len({total for _, total in reports}) == 2, "two texts were begun"
    monkeypatch.undo()
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)
    assert watcher._llm.engines.parts.disk and watcher._llm.engines.parts.disk.queue.flush()
    assert kept(asked(pair, folder, folder.with_name("cache"), capsys))


def test_watcher_waits_until_folder_is_still(watcher: Watcher, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher.read()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) in (2, 3):
            write(folder / "new.txt", WORDS * len(slept), len(slept))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watcher.wait()
    watcher.read()
    (watched,) = watched_folders(CacheFolder(folder.with_name("cache")))
    assert len(slept) >= 4 and [name for name, _ in watched.files] == ["stable.txt", "new.txt"]


def test_watcher_outlives_a_folder_that_is_away(
    watcher: Watcher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = folder.with_name("away")
    watcher.read()
    folder.rename(away)
    watcher.wait()
    with pytest.raises(RequestError, match="no folder"):
        watcher.read()
    monkeypatch.setattr(watch.time, "sleep", lambda _: away.rename(folder) if away.exists() else None)
    watcher.wait()
    watcher.read()


@pytest.mark.parametrize("by_a_write", [False, True], ids=["found by the watcher", "found by a write"])
def test_watcher_reads_again_behind_a_deleted_cache(
    watcher: Watcher, folder: Path, pair: Path, capsys: pytest.CaptureFixture[str], by_a_write: bool
) -> None:
    """Where a text that was being read had the folder made anew, that is noticed, too."""
    cache = folder.with_name("cache")
    watcher.read()
    disk = watcher._llm.engines.parts.disk
    assert disk and disk.queue.flush()
    shutil.rmtree(cache)
    if by_a_write:
        with pytest.raises(OSError, match="made anew"), disk.store.folder.locked():
            pass
    watcher.wait()
    watcher.read()
    assert disk.queue.flush() and [watched.path for watched in watched_folders(CacheFolder(cache))] == [folder]
    assert not watcher._lost(), "it is read again once"
    assert kept(asked(pair, folder, cache, capsys))


def test_watcher_waits_for_a_cache_that_cannot_be_made_anew(
    watcher: Watcher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, slept = folder.with_name("cache"), list[float]()
    watcher.read()
    assert watcher._llm.engines.parts.disk and watcher._llm.engines.parts.disk.queue.flush()
    shutil.rmtree(cache)
    cache.write_text("in the way")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            cache.unlink()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watcher.wait()
    watcher.read()
    assert len(slept) >= 3 and watched_folders(CacheFolder(cache))
