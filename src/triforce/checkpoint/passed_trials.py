"""Record of files that have passed a trial, by digest, in XDG's cache folder. They are not tried again."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from triforce.installed import version_of
from triforce.sandbox import TrialLimits, run_trial
from triforce.user_cache import user_cache


def require_pass(function: str, task: Any, sha256: str, readers: tuple[str, ...], limits: TrialLimits) -> None:
    """Call a function in a sandbox, unless it has passed with the same bytes before. Raises TrialError.

    function, task, limits: as in `sandbox.run_trial`. sha256: hex digest of all bytes that are read; empty: nothing is
    recorded. readers: packages that read the bytes. A pass counts for their current versions only.
    """
    mark = _mark(function, sha256, readers) if sha256 else None
    if mark and mark.exists():
        return
    run_trial(function, task, limits)
    if mark:
        with suppress(OSError):  # a full or read-only disk: the next start tries again
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _mark(function: str, sha256: str, readers: tuple[str, ...]) -> Path | None:
    """Return the marker file of a pass with these bytes; None for a user without a home folder."""
    hashed_facts = [function, sha256, *(f"{name} {version_of(name)}" for name in ("triforce", *readers))]
    cache = user_cache()
    return cache / "passed" / hashlib.sha256("\n".join(hashed_facts).encode()).hexdigest() if cache else None
