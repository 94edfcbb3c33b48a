"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Name a file beside `path` to write to; it takes the place of `path` at the end, and is removed if anything fails.

    What a link points to is replaced, not the link. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # whatever went wrong, Ctrl-C included; after success there is none
            partial.unlink()


def why_unwritable(path: Path) -> str:
    """Return why nothing new can be made in a folder, or a file cannot be written; nothing where it can be."""
    folder = path.is_dir()
    if os.access(path, os.W_OK | (os.X_OK if folder else 0)):
        return ""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    return f"permission denied in the folder {path}" if folder else "permission denied"
