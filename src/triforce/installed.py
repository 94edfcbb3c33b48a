"""Versions of packages as they are installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def version_of(package: str) -> str:
    """Return the version of a package; "" where it is not installed, as triforce that is run from a folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
