"""Files that have passed a trial, by their bytes: they are not tried again. The cache folder of XDG remembers them."""

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

    function, task, limits: as `sandbox.run_trial` takes them. sha256: hex digest of all that is read; without one
    nothing is remembered. readers: packages that read it, whose other versions may fail where these do not.
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
    """Return the file that is there when these bytes have passed; None for a user without a home folder."""
    hashed_facts = [function, sha256, *(f"{name} {version_of(name)}" for name in ("triforce", *readers))]
    cache = user_cache()
    return cache / "passed" / hashlib.sha256("\n".join(hashed_facts).encode()).hexdigest() if cache else None
