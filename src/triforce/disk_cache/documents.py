"""Documents: the text of a file, or of all text files of a folder one after the other.

Files that are as they were when they were last read keep their places, and what changed or is new follows, the oldest
first. So a document begins as it did before, up to the first file that is not as it was, and files that change often
come to stand at its end.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from triforce.errors import RequestError
from triforce.text_encoding import NotTextError, decode

MOST_BYTES = 16 << 20
"""Of a file; a larger one is left out."""
GIT_SECONDS = 60
Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and bytes."""


class TextFile(NamedTuple):
    """A file of a folder: its path in there with slashes, a digest of what it holds, and that."""

    name: str
    digest: str
    text: str


Known = Sequence[tuple[str, str]]
"""Names and digests of files, in the order in which they were read."""


def stamps(folder: Path) -> dict[str, Stamp]:
    """Return the files of a folder that may be texts, by name. Whatever changes in them changes what is returned.

    In a folder that git has, they are those that git has or would add; elsewhere all. Hidden files, links and what is
    too large are left out. Raises RequestError.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder; name one that holds texts")
    root, found = folder.resolve(), {}
    for name in _names(folder):
        try:
            name.encode()
            facts = (folder / name).lstat()
        except (OSError, UnicodeEncodeError):
            continue
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if stat.S_ISREG(facts.st_mode) and 0 < facts.st_size <= MOST_BYTES and not hidden:
            found[name] = facts.st_mtime_ns, facts.st_size
    inside = {path: (root / path).resolve() == root / path for path in {Path(name).parent for name in found}}
    return {name: stamp for name, stamp in found.items() if inside[Path(name).parent]}


def files_of(folder: Path, known: Known = ()) -> list[TextFile]:
    """Return the texts of a folder in their order. known: as they were last read. Raises RequestError without any."""
    oldest = sorted((changed, name) for name, (changed, _) in stamps(folder).items())
    files = {name: file for _, name in oldest if (file := _read(folder, name))}
    if not files:
        raise RequestError(f"there is no text in {folder}; name a folder that holds UTF-8 files")
    kept = [name for name, digest in known if name in files and files[name].digest == digest]
    return [files[name] for name in (*kept, *(name for name in files if name not in set(kept)))]


def joined(files: Sequence[TextFile]) -> str:
    """Return the document of a folder: each file behind a line that names it."""
    return "".join(f"--- {file.name} ---\n{file.text}\n" for file in files)


def _names(folder: Path) -> Iterator[str]:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=GIT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # there is no git, or it does not have the folder
        listed = b""
    if listed:
        yield from dict.fromkeys(os.fsdecode(name) for name in listed.split(b"\0") if name)
        return
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from ((Path(where) / name).relative_to(folder).as_posix() for name in names)


def _read(folder: Path, name: str) -> TextFile | None:
    """Return a file of a folder; None where it is gone, or no text."""
    try:
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(MOST_BYTES)
        text = decode(data)
    except (OSError, NotTextError):
        return None
    return None if "\0" in text else TextFile(name, blake2b(data, digest_size=16).hexdigest(), text)
