"""Paths and names of models as users write them."""

from __future__ import annotations

from pathlib import Path

from triforce.errors import RequestError, argument


def user_path(text: str | Path) -> Path:
    """Return a path, `~` and `~name` being home folders. Raises RequestError where nobody has that name."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{text}: there is no such home folder; write the path without ~") from error


def require_name(name: str, value: object) -> None:
    """Raise TypeError unless an argument is a text, a path or None, and RequestError where it is empty."""
    if not (value is None or isinstance(value, str | Path)):
        raise TypeError(f"{name} is of type {type(value).__name__}; pass a text or a pathlib.Path, or leave it out")
    if value == "":
        raise RequestError(f"{argument(name)} is an empty name; give one, or leave it out")


def named_path(name: str, value: str | Path | None) -> Path | None:
    """Return the path that an argument names, None for none. Raises TypeError or RequestError."""
    require_name(name, value)
    return None if value is None else user_path(value)
