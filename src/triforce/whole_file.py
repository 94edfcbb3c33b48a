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
