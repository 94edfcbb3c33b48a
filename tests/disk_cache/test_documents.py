"""Documents of folders: their files, and the order of these."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from triforce.disk_cache import documents
from triforce.disk_cache import documents as disk_cache_documents
from triforce.disk_cache.documents import SkippedFiles, WatchedFolder, files_of, joined, stamps
from triforce.disk_cache.folder import CacheFolder
from triforce.errors import RequestError

SECOND = 10**9


def write_with_mtime(folder: Path, name: str, text: str, changed: int = 0) -> Path:
    """Write a file whose time of change is the given second."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(changed * SECOND, changed * SECOND))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of three texts, the stable ones older."""
    for changed, name in enumerate(("z.md", "src/b.py", "a.txt"), 1):
        write_with_mtime(tmp_path / "texts", name, f"this is {name}", changed)
    return tmp_path / "texts"


def names(folder: Path, known_files: documents.KnownFiles = ()) -> list[str]:
    return [file.name for file in files_of(folder, known_files)]


def file_digests(folder: Path, known_files: documents.KnownFiles = ()) -> documents.KnownFiles:
    return [(file.name, file.digest) for file in files_of(folder, known_files)]


def test_stable_files_come_first(folder: Path) -> None:
    assert names(folder) == ["z.md", "src/b.py", "a.txt"]
    assert joined(files_of(folder)).startswith("--- z.md ---\nthis is z.md\n--- src/b.py ---\n")


def test_changed_file_goes_behind_all_others_and_stays_there(folder: Path) -> None:
    first_listing = file_digests(folder)
    write_with_mtime(folder, "z.md", "another", 9)
    write_with_mtime(folder, "new.md", "new", 8)
    assert names(folder, first_listing) == ["src/b.py", "a.txt", "new.md", "z.md"]
    again = file_digests(folder, first_listing)
    write_with_mtime(folder, "z.md", "changed once more", 10)
    assert names(folder, again) == names(folder, first_listing), "only what stands at the end is another"


def test_files_that_are_only_touched_keep_their_places(folder: Path) -> None:
    first_listing = file_digests(folder)
    write_with_mtime(folder, "z.md", "this is z.md", 99)
    assert names(folder, first_listing) == ["z.md", "src/b.py", "a.txt"]
    (folder / "src" / "b.py").unlink()
    assert names(folder, first_listing) == ["z.md", "a.txt"]


def test_only_texts_of_the_folder_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_FILE_BYTES", 100)
    (tmp_path / "secret").write_text("of another owner")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "away").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(folder / "pipe")
    for name, data in {"binary": b"a\0b", "latin": b"\xe9", "empty": b"", "large": b"a" * 101}.items():
        (folder / name).write_bytes(data)
    write_with_mtime(folder, ".hidden/notes", "no")
    assert names(folder) == ["z.md", "src/b.py", "a.txt"]


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git here")
def test_git_says_which_files_belong_to_repository(folder: Path) -> None:
    write_with_mtime(folder, ".gitignore", "build/\n")
    write_with_mtime(folder, "build/made.txt", "made")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    assert names(folder) == ["z.md", "src/b.py", "a.txt"]
    assert names(folder / "build") == ["made.txt"], "what is asked for by name is read"


@pytest.mark.parametrize("place", ["cache", "src/cache", "."])
def test_disk_cache_in_a_folder_is_none_of_its_texts(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's files change with each reading. Texts beside them, and files with such names elsewhere, are texts."""
    monkeypatch.setattr(documents, "MAX_FILE_BYTES", 100)
    for name in ("secret", "src/state", "src/manifest"):
        write_with_mtime(folder, name, "a text of the user's", 9)
    plain_names = names(folder)
    if place == ".":
        (folder / "secret").unlink()
        plain_names.remove("secret")
        CacheFolder(folder.parent / "cache").close()
        shutil.copytree(folder.parent / "cache", folder, dirs_exist_ok=True)
        cache = folder
    else:
        CacheFolder(cache := folder / place).close()
    (cache / f"{0:040}.kv").write_bytes(bytes(101))
    for round in range(2):
        (cache / "manifest").write_text(f"read {round} times")
        left_out = SkippedFiles()
        assert [file.name for file in files_of(folder, (), left_out)] == plain_names and not left_out.summary
    write_with_mtime(folder, f"{place}/note.md", "a text of the user's", 99)
    assert names(folder)[-1] == (Path(place) / "note.md").as_posix()


@pytest.mark.parametrize("change", ["text", "new file", "gone"])
def test_stamps_change_with_any_file(folder: Path, change: str) -> None:
    old_stamps = stamps(folder)
    if change == "gone":
        (folder / "a.txt").unlink()
    else:
        write_with_mtime(folder, "a.txt" if change == "text" else "b.txt", "more", 50)
    assert stamps(folder) != old_stamps


def test_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no text"):
        files_of(tmp_path)
    with pytest.raises(RequestError, match="no folder"):
        files_of(tmp_path / "nowhere")


def test_manifest_gives_documents_in_their_order(folder: Path, tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "cache")
    order = file_digests(folder)
    disk_cache_documents.record_folder(cache, WatchedFolder(folder, False, order))
    disk_cache_documents.record_folder(cache, WatchedFolder(folder / "src", True, file_digests(folder / "src")))
    write_with_mtime(folder, "z.md", "another", 9)
    expected = joined(files_of(folder, order))
    assert expected != joined(files_of(folder)) or names(folder) == names(folder, order)
    joined_text, single_file = disk_cache_documents.documents(cache)
    assert (joined_text.name, joined_text.text()) == ("texts", expected)
    assert (single_file.name, single_file.text()) == ("b.py", "this is src/b.py") and single_file.id != joined_text.id
    assert disk_cache_documents.text_of(folder, tmp_path / "cache") == expected
    disk_cache_documents.record_folder(cache, WatchedFolder(folder, False, file_digests(folder, order)))
    assert len(disk_cache_documents.watched_folders(cache)) == 2
    assert (tmp_path / "cache" / "manifest").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'[{"path": 3}]', b'[{"path": "a", "each": 1, "files": [1]}]'])
def test_damaged_manifest_says_nothing(folder: Path, tmp_path: Path, damage: bytes) -> None:
    cache = CacheFolder(tmp_path / "cache")
    disk_cache_documents.record_folder(cache, WatchedFolder(folder, False, file_digests(folder)))
    (tmp_path / "cache" / "manifest").write_bytes(damage)
    assert disk_cache_documents.watched_folders(cache) == []
    assert disk_cache_documents.text_of(folder, tmp_path / "cache") == joined(files_of(folder))
    disk_cache_documents.record_folder(cache, WatchedFolder(folder, False, file_digests(folder)))
    assert len(disk_cache_documents.watched_folders(cache)) == 1


def test_clear_removes_manifest_and_keeps_folder_in_use(folder: Path, tmp_path: Path) -> None:
    from triforce.disk_cache.entry_store import EntryStore

    store = EntryStore(CacheFolder(tmp_path / "cache"), 10_000)
    disk_cache_documents.record_folder(store.folder, WatchedFolder(folder, False, file_digests(folder)))
    assert store.entries() == [] and store.clear() == (0, 0, [])
    assert disk_cache_documents.watched_folders(store.folder) == []
    assert disk_cache_documents.text_of(folder, tmp_path / "no cache") == joined(files_of(folder))


def test_links_on_the_way_to_a_file_are_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git lists files whose folder, or which themselves, may have become links since."""
    write_with_mtime(folder.parent, "elsewhere/secret.txt", "secret")
    (folder / "linked").symlink_to(folder.parent / "elsewhere")
    (folder / "link.txt").symlink_to(folder.parent / "elsewhere" / "secret.txt")
    monkeypatch.setattr(documents, "_names", lambda *_: iter(["a.txt", "linked/secret.txt", "link.txt"]))
    assert list(stamps(folder)) == ["a.txt"]
    assert documents._read(folder, "link.txt", SkippedFiles()) is None
