"""Manifest: the folders whose texts were read into a disk cache, and in which order.

It lies in the cache's folder, so whoever may read the one may read the other. `clear` removes it with the entries.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from triforce.disk_cache.documents import Known, TextFile, files_of, joined
from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.folder_checks import MANIFEST
from triforce.disk_cache.left_out import LeftOut
from triforce.errors import CacheError

MOST_BYTES = 64 << 20
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
        return [WatchedFolder(_path(told), told["each"] is True, _files(told)) for told in _read(cache)]
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


def _read(cache: CacheFolder) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cache.read(MANIFEST, MOST_BYTES))
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
