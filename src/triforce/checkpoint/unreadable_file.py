"""The error of a model's file that the system does not let be read."""

from __future__ import annotations

import os
from pathlib import Path

from triforce.errors import ModelError


def unreadable(file: str | bytes | Path, error: OSError) -> ModelError:
    """Return the error of a file that cannot be read. One that is closed to the user is not to be fetched again."""
    closed = isinstance(error, PermissionError)
    advice = "have its owner let you read it, or name another model" if closed else "download it again"
    return ModelError(f"{os.fsdecode(file)} cannot be read ({error.strerror or error}); {advice}")
