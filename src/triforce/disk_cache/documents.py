"""Documents: the text of a file, or of all text files of a folder one after the other.

Files that are as they were when they were last read keep their places, and what changed or is new follows, the oldest
first. So a document begins as it did before, up to the first file that is not as it was, and files that change often
come to stand at its end.
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

SHOWN = 3
"""Names of a reason that are listed; others are counted."""


class LeftOut:
    """Files and folders that are left out, by the reasons for that."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, why: str | OSError | NotTextError) -> None:
        """Add a file or a folder. What is gone meanwhile is not left out."""
        if isinstance(why, NotTextError):
            told = f"in another encoding; perhaps {why.conversion} converts it"
            why = told if why.conversion else "not UTF-8 text"
        elif isinstance(why, OSError):
            why = "" if isinstance(why, FileNotFoundError) else why.strerror or str(why)
        if why:
            self._names.setdefault(why, []).append(name)

    @property
    def told(self) -> str:
        """Return all in one line, each reason behind the names that it is of; nothing where nothing is left out."""
        return "; ".join(f"{_listed(sorted(names))} ({why})" for why, names in sorted(self._names.items()))


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")


MOST_BYTES = 16 << 20
"""Of a file; a larger one is left out."""
GIT_SECONDS = 60
LINK = "a link, which is not followed"
_CLOSED = re.compile(r"could not open directory '(.+?)/?': (.+)")
"""What git says of a folder that it cannot read."""
Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and bytes."""


class TextFile(NamedTuple):
    """A file of a folder: its path in there with slashes, a digest of what it holds, and that."""

    name: str
    digest: str
    text: str


Known = Sequence[tuple[str, str]]
"""Names and digests of files, in the order in which they were read."""


def stamps(folder: Path, left_out: LeftOut | None = None) -> dict[str, Stamp]:
    """Return the files of a folder that may be texts, by name. Whatever changes in them changes what is returned.

    In a folder that git has, they are those that git has or would add; elsewhere all. Hidden files and those of disk
    caches are left out, and so are links, what is too large and what cannot be read, which `left_out` tells of. Raises
    RequestError.
    """
    left_out = LeftOut() if left_out is None else left_out
    _require_folder(folder)
    root = folder.resolve()
    found = {}
    for name in _outside_caches(list(_names(folder, left_out))):
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        try:
            name.encode()
            facts = (folder / name).lstat()
        except UnicodeEncodeError:
            left_out.add(name, "a name that is not UTF-8")
        except OSError as error:
            left_out.add(name, error)
        else:
            if why := _unfit(facts):
                left_out.add(name, why)
            elif facts.st_size:
                found[name] = facts.st_mtime_ns, facts.st_size
    inside = {path: (root / path).resolve() == root / path for path in {Path(name).parent for name in found}}
    for name in [name for name in found if not inside[Path(name).parent]]:
        left_out.add(name, LINK)
        del found[name]
    return found


def files_of(folder: Path, known: Known = (), left_out: LeftOut | None = None) -> list[TextFile]:
    """Return the texts of a folder in their order. known: as they were last read. Raises RequestError without any.

    left_out: to what is left out is added.
    """
    left_out = LeftOut() if left_out is None else left_out
    oldest = sorted((changed, name) for name, (changed, _) in stamps(folder, left_out).items())
    files = {name: file for _, name in oldest if (file := _read(folder, name, left_out))}
    if not files:
        raise no_text(folder, left_out)
    kept = [name for name, digest in known if name in files and files[name].digest == digest]
    return [files[name] for name in (*kept, *(name for name in files if name not in set(kept)))]


def no_text(folder: Path | str, left_out: LeftOut) -> RequestError:
    """Return the error of a folder without a text that can be read."""
    told = f" that can be read: {left_out.told}" if left_out.told else ""
    return RequestError(f"there is no text in {folder}{told}; name a folder that holds UTF-8 files")


def barred(folder: Path, error: OSError) -> RequestError:
    """Return the error of a folder that cannot be read."""
    return RequestError(f"{folder} cannot be read ({error.strerror}); name a folder of texts that you may read")


def joined(files: Sequence[TextFile]) -> str:
    """Return the document of a folder: each file behind a line that names it."""
    return "".join(f"--- {file.name} ---\n{file.text}\n" for file in files)


def _require_folder(folder: Path) -> None:
    """Raise RequestError for what is no folder, or cannot be reached."""
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return
    except PermissionError as error:
        raise barred(folder, error) from error
    except OSError:  # there is nothing of that name
        pass
    raise RequestError(f"{folder} is no folder; name one that holds texts")


def _unfit(facts: os.stat_result) -> str:
    """Return why something in a folder is not read; nothing of a file that may be a text."""
    if stat.S_ISLNK(facts.st_mode):
        return LINK
    if stat.S_ISDIR(facts.st_mode):
        return "a repository of its own"
    if not stat.S_ISREG(facts.st_mode):
        return "no regular file"
    return f"larger than {MOST_BYTES >> 20} MiB" if facts.st_size > MOST_BYTES else ""


def _names(folder: Path, left_out: LeftOut) -> Iterator[str]:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    how = {"env": os.environ | {"LC_ALL": "C"}, "timeout": GIT_SECONDS}
    try:
        done = subprocess.run(command, capture_output=True, check=True, **how)  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):  # there is no git, or it does not have the folder
        done = None
    if done and done.stdout:
        for name, why in _CLOSED.findall(os.fsdecode(done.stderr)):
            left_out.add(name, why)
        yield from dict.fromkeys(os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
        return

    def tell(error: OSError) -> None:
        if Path(error.filename) == folder:
            raise barred(folder, error) from error
        left_out.add(Path(error.filename).relative_to(folder).as_posix(), error)

    for where, folders, names in os.walk(folder, onerror=tell):
        links = [name for name in folders if os.path.islink(Path(where) / name)]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from ((Path(where) / name).relative_to(folder).as_posix() for name in (*names, *links))


def _outside_caches(names: Collection[str]) -> Iterator[str]:
    """Yield names of files but those of disk caches, which change with each text that is read."""
    names_by_folder = defaultdict(set)
    for name in names:
        names_by_folder[Path(name).parent].add(Path(name).name)
    caches = {folder: cache_files(held) for folder, held in names_by_folder.items()}
    return (name for name in names if Path(name).name not in caches[Path(name).parent])


def _read(folder: Path, name: str, left_out: LeftOut) -> TextFile | None:
    """Return a file of a folder; None where it is gone, is left out, or is no text."""
    try:
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(MOST_BYTES)
        if "\0" in (text := decode(data)):
            raise NotTextError("holds NUL")
    except (OSError, NotTextError) as error:
        left_out.add(name, error)
        return None
    return TextFile(name, blake2b(data, digest_size=16).hexdigest(), text)


MANIFEST_BYTES = 64 << 20
"""Of a manifest; a larger one is damaged."""


class WatchedFolder(NamedTuple):
    """A folder that was read. each: every file is a document; else all of them are one. files: in their order."""

    path: Path
    each: bool
    files: Known


class Document(NamedTuple):
    """A document that was read: a name for people, the folder, and the file if it is one alone."""

    name: str
    folder: WatchedFolder
    file: str | None

    @property
    def id(self) -> str:
        """A name for machines, which says nothing."""
        told = f"{self.folder.path}\n{self.file}"
        return blake2b(told.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()

    def text(self) -> str:
        """Return its text as it is now. Raises RequestError where there is none any more."""
        files: list[TextFile] = files_of(self.folder.path, self.folder.files)
        if self.file is None:
            return joined(files)
        return next((file.text for file in files if file.name == self.file), "")


def note(cache: CacheFolder, folder: WatchedFolder) -> None:
    """Write what was read of a folder, in the place of what was read of it before. Raises OSError."""
    with cache.locked():
        others = [each for each in watched(cache) if each.path != folder.path]
        cache.replace(MANIFEST, json.dumps([_told(each) for each in (*others, folder)]).encode())


def watched(cache: CacheFolder) -> list[WatchedFolder]:
    """Return the folders that were read. A manifest that is damaged has none: it is a hint."""
    try:
        return [WatchedFolder(_path(told), told["each"] is True, _files(told)) for told in _read_manifest(cache)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def documents(cache: CacheFolder) -> Iterator[Document]:
    """Yield all documents that were read."""
    for folder in watched(cache):
        if folder.each:
            yield from (Document(name, folder, name) for name, _ in folder.files)
        else:
            yield Document(os.fsencode(folder.path.name).decode("utf-8", "replace"), folder, None)


def text_of(folder: Path, cache: Path | None, network: bool = False, left_out: LeftOut | None = None) -> str:
    """Return the document of a folder, in the order in which it was read into a disk cache, if it was.

    left_out: to what is left out is added. Raises RequestError where it holds no text. What is wrong with the cache is
    not said here.
    """
    known: Known = ()
    if cache:
        try:
            opened = CacheFolder(cache, network, create=False)
        except CacheError:
            return joined(files_of(folder, (), left_out))
        known = next((each.files for each in watched(opened) if each.path == folder.resolve()), ())
        opened.close()
    return joined(files_of(folder, known, left_out))


def _told(folder: WatchedFolder) -> dict[str, Any]:
    return {"path": str(folder.path), "each": folder.each, "files": [list(file) for file in folder.files]}


def _read_manifest(cache: CacheFolder) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cache.read(MANIFEST, MANIFEST_BYTES))
    return found


def _path(told: dict[str, Any]) -> Path:
    """Return the path of a folder, which can be one. Raises ValueError."""
    path: str = told["path"]
    if b"\0" in os.fsencode(path):
        raise ValueError("no path has a NUL")
    return Path(path)


def _files(told: dict[str, Any]) -> Known:
    files = [(str(name), str(digest)) for name, digest in told["files"]]
    "".join(name for name, _ in files).encode()  # such names are not read either
    return files
