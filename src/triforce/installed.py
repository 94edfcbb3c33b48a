"""Versions of installed packages."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def version_of(package: str) -> str:
    """Return the version of a package; "" if it is not installed, as when triforce runs from a source folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
