"""A cache folder belongs to its owner alone; unsafe folders are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cache_folders import present, store_in, write
from triforce.disk_cache import folder_checks
from triforce.disk_cache import folder_checks as module
from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.folder_checks import SECRET, STATE
from triforce.errors import CacheError


def test_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        CacheFolder(tmp_path / "cache").close()
    finally:
        os.umask(mask)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert {f.name: f.stat().st_mode & 0o777 for f in (tmp_path / "cache").iterdir()} == {SECRET: 0o600, STATE: 0o600}


def test_secret_stays_and_differs_between_folders(tmp_path: Path) -> None:
    original, again, other_folder = (CacheFolder(tmp_path / name) for name in ("a", "a", "b"))
    assert original.secret == again.secret != other_folder.secret and len(original.secret) == 32


def link(path: Path) -> None:
    (path.parent / "real").mkdir(mode=0o700)
    path.symlink_to(path.parent / "real")


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o720)


def with_other_files(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "letter.txt").write_text("dear")


def with_linked_secret(path: Path) -> None:
    CacheFolder(path).close()
    (path / SECRET).rename(path.parent / "elsewhere")
    (path / SECRET).symlink_to(path.parent / "elsewhere")


def with_readable_secret(path: Path) -> None:
    CacheFolder(path).close()
    (path / SECRET).chmod(0o644)


def a_file(path: Path) -> None:
    path.write_text("")


UNSAFE = [
    link, open_to_others, with_other_files, with_linked_secret, with_readable_secret, a_file,
]  # fmt: skip


@pytest.mark.parametrize("make", UNSAFE, ids=lambda make: make.__name__)
def test_unsafe_folder_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(path := tmp_path / "cache")
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CacheError, match=str(path)):
        CacheFolder(path)
    assert len(os.listdir("/proc/self/fd")) == open_files, "nothing stays open"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_secret_is_told_and_made_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Entries under the damaged secret are removed, as no name would find them."""
    damaged_store = store_in(tmp_path / "cache")
    write(damaged_store, 1, 2)
    path = tmp_path / "cache" / SECRET
    data = path.read_bytes()
    path.write_bytes({"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "empty": b""}[damage])
    store = store_in(tmp_path / "cache")
    assert len(caplog.records) == 1 and "secret" in caplog.text
    assert store.entries() == [] and store.folder.secret != damaged_store.folder.secret
    assert all(present(store_in(tmp_path / "cache"), write(store, 1, 2)))


def test_folder_in_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="inside a folder that exists"):
        CacheFolder(tmp_path / "no" / "cache")


def test_foreign_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CacheFolder(tmp_path / "cache").close()
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="another user"):
        CacheFolder(tmp_path / "cache")


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "smb3", "fuse.sshfs", "fuseblk"])
def test_network_file_system_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(module, "file_system", lambda descriptor: kind)
    with pytest.raises(CacheError, match=f"{kind}.*disk_cache_network=True"):
        CacheFolder(tmp_path / "cache")
    CacheFolder(tmp_path / "cache", network=True).close()


def test_file_system_is_found_by_mount() -> None:
    descriptor = os.open("/proc/self", os.O_RDONLY)
    assert folder_checks.file_system(descriptor) == "proc"
    os.close(descriptor)


def test_file_system_that_cannot_be_known_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems do not name the mount of a file."""
    monkeypatch.setattr(
        folder_checks.Path, "read_text", lambda self, errors="": "pos: 0\n1 0 0:1 / / rw - ext4 disk rw\n"
    )
    assert folder_checks.file_system(0) == ""


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "readable"])
def test_unsafe_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    folder, path = CacheFolder(tmp_path / "cache"), tmp_path / "cache" / "name"
    if kind == "link":
        (tmp_path / "other").write_text("")
        path.symlink_to(tmp_path / "other")
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("")
        path.chmod(0o640)
    with pytest.raises(OSError):
        folder.open("name")


def test_folder_that_is_renamed_stays_the_one_in_use(tmp_path: Path) -> None:
    """Files are reached by the folder's descriptor, so another folder put in its place is not followed."""
    folder = CacheFolder(tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").mkdir()
    os.close(folder.open("name", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "moved" / "name").exists() and not list((tmp_path / "cache").iterdir())


def test_state_is_shared_between_openings(tmp_path: Path) -> None:
    opening = CacheFolder(tmp_path / "cache")
    second_opening = CacheFolder(tmp_path / "cache")
    with opening.locked() as state:
        state.order = 7
        state.bytes = 1 << 40
    with second_opening.locked() as state:
        assert (state.order, state.bytes) == (7, 1 << 40)
    (tmp_path / "cache" / STATE).write_bytes(b"torn")
    with second_opening.locked() as state:
        assert (state.order, state.bytes) == (0, 0)
