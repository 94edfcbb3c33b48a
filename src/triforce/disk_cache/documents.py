"""Documents: the text of a file, or of all text files of a folder one after the other.

Files that have not changed since they were last read keep their places. Changed and new files follow, the oldest first.
So a document begins as it did before, up to the first changed file, and files that change often move to its end.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.folder_checks import MANIFEST, cache_files
from triforce.errors import CacheError, RequestError
from triforce.user_files import NotTextError, decode

LISTED_NAMES = 3
"""Names that are listed with each reason; further names are only counted."""


class SkippedFiles:
    """Files and folders that are left out, by reason."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, reason: str | OSError | NotTextError) -> None:
        """Add a file or a folder. One that has been deleted meanwhile is not added."""
        if isinstance(reason, NotTextError):
            hint = f"in another encoding; perhaps {reason.conversion} converts it"
            reason = hint if reason.conversion else "not UTF-8 text"
        elif isinstance(reason, OSError):
            reason = "" if isinstance(reason, FileNotFoundError) else reason.strerror or str(reason)
        if reason:
            self._names.setdefault(reason, []).append(name)

    @property
    def summary(self) -> str:
        """All names in one line, each reason after its names; empty where nothing is left out."""
        return "; ".join(f"{_listed(sorted(names))} ({why})" for why, names in sorted(self._names.items()))


def _listed(names: list[str]) -> str:
    unlisted_count = len(names) - LISTED_NAMES
    return ", ".join(names[:LISTED_NAMES]) + (f" and {unlisted_count:,} more" if unlisted_count > 0 else "")


MAX_FILE_BYTES = 16 << 20
"""Bytes of a file at most; a larger one is left out."""
GIT_SECONDS = 60
LINK = "a link, which is not followed"
_GIT_UNREADABLE = re.compile(r"could not open directory '(.+?)/?': (.+)")
"""Git's message about a folder that it cannot read."""
Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and bytes."""


class TextFile(NamedTuple):
    """A file of a folder: its relative path with slashes, a digest of its bytes, and its text."""

    name: str
    digest: str
    text: str


KnownFiles = Sequence[tuple[str, str]]
"""Names and digests of files, in the order in which they were read."""


def stamps(folder: Path, skipped: SkippedFiles | None = None) -> dict[str, Stamp]:
    """Return the stamps of a folder's files that may be texts, by name. A change of a file changes its stamp.

    In a git repository these are the files that git tracks or would add; elsewhere all files. Hidden files and those of
    disk caches are left out. Links, files that are too large, and files that cannot be read are left out and added to
    `skipped`. Raises RequestError.
    """
    skipped = SkippedFiles() if skipped is None else skipped
    _require_folder(folder)
    root = folder.resolve()
    stamps_by_name = {}
    for name in _outside_caches(list(_names(folder, skipped))):
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        try:
            name.encode()
            file_stat = (folder / name).lstat()
        except UnicodeEncodeError:
            skipped.add(name, "a name that is not UTF-8")
        except OSError as error:
            skipped.add(name, error)
        else:
            if reason := _skip_reason(file_stat):
                skipped.add(name, reason)
            elif file_stat.st_size:
                stamps_by_name[name] = file_stat.st_mtime_ns, file_stat.st_size
    is_inside = {
        path: (root / path).resolve() == root / path for path in {Path(name).parent for name in stamps_by_name}
    }
    for name in [name for name in stamps_by_name if not is_inside[Path(name).parent]]:
        skipped.add(name, LINK)
        del stamps_by_name[name]
    return stamps_by_name


def files_of(folder: Path, known_files: KnownFiles = (), skipped: SkippedFiles | None = None) -> list[TextFile]:
    """Return the texts of a folder in their order. Raises RequestError where there is none.

    known_files: names and digests at the last reading. skipped: receives the files that are left out.
    """
    skipped = SkippedFiles() if skipped is None else skipped
    oldest = sorted((changed, name) for name, (changed, _) in stamps(folder, skipped).items())
    files = {name: file for _, name in oldest if (file := _read(folder, name, skipped))}
    if not files:
        raise no_text(folder, skipped)
    unchanged_names = [name for name, digest in known_files if name in files and files[name].digest == digest]
    return [files[name] for name in (*unchanged_names, *(name for name in files if name not in set(unchanged_names)))]


def no_text(folder: Path | str, skipped: SkippedFiles) -> RequestError:
    """Return the error of a folder without a text that can be read."""
    suffix = f" that can be read: {skipped.summary}" if skipped.summary else ""
    return RequestError(f"there is no text in {folder}{suffix}; name a folder that holds UTF-8 files")


def unreadable_folder(folder: Path, error: OSError) -> RequestError:
    """Return the error of a folder that cannot be read."""
    return RequestError(f"{folder} cannot be read ({error.strerror}); name a folder of texts that you may read")


def joined(files: Sequence[TextFile]) -> str:
    """Return the document of a folder: each file follows a line with its name."""
    return "".join(f"--- {file.name} ---\n{file.text}\n" for file in files)


def _require_folder(folder: Path) -> None:
    """Raises RequestError unless a path is a folder that can be reached."""
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return
    except PermissionError as error:
        raise unreadable_folder(folder, error) from error
    except OSError:  # there is nothing of that name
        pass
    raise RequestError(f"{folder} is no folder; name one that holds texts")


def _skip_reason(file_stat: os.stat_result) -> str:
    """Return why a file is not read; empty for a file that may be a text."""
    if stat.S_ISLNK(file_stat.st_mode):
        return LINK
    if stat.S_ISDIR(file_stat.st_mode):
        return "a repository of its own"
    if not stat.S_ISREG(file_stat.st_mode):
        return "no regular file"
    return f"larger than {MAX_FILE_BYTES >> 20} MiB" if file_stat.st_size > MAX_FILE_BYTES else ""


def _names(folder: Path, skipped: SkippedFiles) -> Iterator[str]:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    options = {"env": os.environ | {"LC_ALL": "C"}, "timeout": GIT_SECONDS}
    try:
        git_output = subprocess.run(command, capture_output=True, check=True, **options)  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):  # git is not installed, or the folder is in no repository
        git_output = None
    if git_output and git_output.stdout:
        for name, reason in _GIT_UNREADABLE.findall(os.fsdecode(git_output.stderr)):
            skipped.add(name, reason)
        yield from dict.fromkeys(os.fsdecode(name) for name in git_output.stdout.split(b"\0") if name)
        return

    def skip_folder(error: OSError) -> None:
        if Path(error.filename) == folder:
            raise unreadable_folder(folder, error) from error
        skipped.add(Path(error.filename).relative_to(folder).as_posix(), error)

    for parent, folders, names in os.walk(folder, onerror=skip_folder):
        links = [name for name in folders if os.path.islink(Path(parent) / name)]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from ((Path(parent) / name).relative_to(folder).as_posix() for name in (*names, *links))


def _outside_caches(names: Collection[str]) -> Iterator[str]:
    """Yield names of files, except those of disk caches, which change with each text that is read."""
    names_by_folder = defaultdict(set)
    for name in names:
        names_by_folder[Path(name).parent].add(Path(name).name)
    caches = {folder: cache_files(held) for folder, held in names_by_folder.items()}
    return (name for name in names if Path(name).name not in caches[Path(name).parent])


def _read(folder: Path, name: str, skipped: SkippedFiles) -> TextFile | None:
    """Return a file of a folder; None where it is deleted, left out, or no text."""
    try:
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(MAX_FILE_BYTES)
        if "\0" in (text := decode(data)):
            raise NotTextError("holds NUL")
    except (OSError, NotTextError) as error:
        skipped.add(name, error)
        return None
    return TextFile(name, blake2b(data, digest_size=16).hexdigest(), text)


MAX_MANIFEST_BYTES = 64 << 20
"""Bytes of a manifest at most; a larger one is damaged."""


class WatchedFolder(NamedTuple):
    """A folder that was read. per_file: each file is a document; else all files are one. files: in their order."""

    path: Path
    per_file: bool
    files: KnownFiles


class Document(NamedTuple):
    """A document that was read: its name for people, its folder, and its file; None: all files of the folder."""

    name: str
    folder: WatchedFolder
    file: str | None

    @property
    def id(self) -> str:
        """Opaque identifier: a hash of folder and file."""
        identity = f"{self.folder.path}\n{self.file}"
        return blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()

    def text(self) -> str:
        """Return the document's text as it is now. Raises RequestError where there is none any more."""
        files: list[TextFile] = files_of(self.folder.path, self.folder.files)
        if self.file is None:
            return joined(files)
        return next((file.text for file in files if file.name == self.file), "")


def record_folder(cache: CacheFolder, folder: WatchedFolder) -> None:
    """Write a folder to the manifest, in place of its earlier row. Raises OSError."""
    with cache.locked():
        other_folders = [row for row in watched_folders(cache) if row.path != folder.path]
        cache.replace(MANIFEST, json.dumps([_manifest_row(row) for row in (*other_folders, folder)]).encode())


def watched_folders(cache: CacheFolder) -> list[WatchedFolder]:
    """Return the folders of the manifest; none where it is damaged, as it is only a hint."""
    try:
        return [WatchedFolder(_path(row), row["each"] is True, _files(row)) for row in _read_manifest(cache)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def documents(cache: CacheFolder) -> Iterator[Document]:
    """Yield all documents of the manifest."""
    for folder in watched_folders(cache):
        if folder.per_file:
            yield from (Document(name, folder, name) for name, _ in folder.files)
        else:
            yield Document(os.fsencode(folder.path.name).decode("utf-8", "replace"), folder, None)


def text_of(folder: Path, cache: Path | None, network: bool = False, skipped: SkippedFiles | None = None) -> str:
    """Return the document of a folder. Its files have the order of the manifest in the disk cache `cache`, if any.

    skipped: receives the files that are left out. Raises RequestError where the folder holds no text. A cache that
    cannot be opened is ignored.
    """
    known_files: KnownFiles = ()
    if cache:
        try:
            opened = CacheFolder(cache, network, create=False)
        except CacheError:
            return joined(files_of(folder, (), skipped))
        known_files = next(
            (
                watched_folder.files
                for watched_folder in watched_folders(opened)
                if watched_folder.path == folder.resolve()
            ),
            (),
        )
        opened.close()
    return joined(files_of(folder, known_files, skipped))


def _manifest_row(folder: WatchedFolder) -> dict[str, Any]:
    return {"path": str(folder.path), "each": folder.per_file, "files": [list(file) for file in folder.files]}


def _read_manifest(cache: CacheFolder) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(cache.read(MANIFEST, MAX_MANIFEST_BYTES))
    return rows


def _path(row: dict[str, Any]) -> Path:
    """Return the folder's path of a manifest row. Raises ValueError for one that is no path."""
    path: str = row["path"]
    if b"\0" in os.fsencode(path):
        raise ValueError("no path has a NUL")
    return Path(path)


def _files(row: dict[str, Any]) -> KnownFiles:
    files = [(str(name), str(digest)) for name, digest in row["files"]]
    "".join(name for name, _ in files).encode()  # raises UnicodeEncodeError for names that `stamps` leaves out
    return files
