"""The cache folder of a user. Its content may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return triforce's cache folder by the rules of XDG; None for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triforce"
    except RuntimeError:
        return None
