"""Atomic replacement of files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`. It replaces `path` at the end, and is removed if anything fails.

    The target of a link is replaced, not the link. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # after any failure, Ctrl-C included; after success it is gone
            partial.unlink()


def why_unwritable(path: Path) -> str:
    """Return why a folder or a file cannot be written; empty if it can."""
    is_folder = path.is_dir()
    if os.access(path, os.W_OK | (os.X_OK if is_folder else 0)):
        return ""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    return f"permission denied in the folder {path}" if is_folder else "permission denied"
