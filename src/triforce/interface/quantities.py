"""Sizes and paths as users write them, and counts as messages show them."""

from __future__ import annotations

import re
from pathlib import Path

from triforce.errors import RequestError, argument

MAX_BYTES = (1 << 63) - 1
"""Maximal size in bytes: the largest file offset."""
MIN_CACHE_BYTES = 1 << 20
"""Minimal size of a disk cache in bytes: about one segment of a model."""
SHOWN_CHARACTERS = 40
"""Characters of an invalid size that the error shows."""


def size_of(text: str | int, argument_name: str = "kv_memory") -> int:
    """Return the bytes of `512MiB`, `2GiB` or a number. Raises RequestError that names the argument `argument_name`."""
    size_text = str(min(text, MAX_BYTES + 1) if isinstance(text, int) else text).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", size_text, re.IGNORECASE | re.ASCII)
    unit = ((match and match[2]) or "B").upper()
    base = 1000 if unit.endswith("B") and "I" not in unit else 1024
    size = float(match[1]) * base ** "BKMGT".index(unit[0]) if match else MAX_BYTES + 1
    if size > MAX_BYTES:
        shown = size_text if len(size_text) <= SHOWN_CHARACTERS else f"{size_text[:SHOWN_CHARACTERS]}..."
        advice = "give a size such as 512MiB or 2GiB" + ", or auto" * (argument_name == "kv_memory")
        raise RequestError(f"{argument(argument_name)} {shown!r}: {advice}")
    return int(size)


def cache_size_of(size: str | int) -> int:
    """Return the size limit of a disk cache in bytes. Raises RequestError below `MIN_CACHE_BYTES`."""
    limit = size_of(size, "disk_cache_size")
    if limit < MIN_CACHE_BYTES:
        raise RequestError(
            f"{argument('disk_cache_size', size)} is too small for any text; give 64MiB or more, or leave out "
            f"{argument('disk_cache')}"
        )
    return limit


def user_path(text: str | Path) -> Path:
    """Return a path with `~` and `~name` expanded. Raises RequestError where no user has that name."""
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
    """Return the path that an argument names, or None. Raises TypeError or RequestError."""
    require_name(name, value)
    return None if value is None else user_path(value)


def counted(count: int, thing: str, things: str = "") -> str:
    """Return a count with its noun: `1 turn`, `2 turns`. things: the plural, if it is not `thing` and an s."""
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"
