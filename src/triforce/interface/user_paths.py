"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from triforce.errors import RequestError


def user_path(text: str | Path) -> Path:
    """Return a path, `~` and `~name` being home folders. Raises RequestError where nobody has that name."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{text}: there is no such home folder; write the path without ~") from error
