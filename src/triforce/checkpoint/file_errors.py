"""Errors of weight files: missing, corrupt, or refused."""

from __future__ import annotations

from pathlib import Path

from triforce.errors import ModelError, unreadable

ADVICE = "ask for a safetensors version of this model"


def missing_file_error(file: Path) -> ModelError:
    """Return the error for a missing file that an index names."""
    return ModelError(f"{file} is missing, though the index of shards names it; download it again")


def corrupt_file_error(file: Path, error: Exception) -> ModelError:
    """Return the error for a file that its library cannot read."""
    if isinstance(error, PermissionError):
        return unreadable(file, error)
    return ModelError(f"{file} is corrupt, truncated or a Git LFS pointer ({reason_of(error)}); download it again")


def reason_of(error: Exception) -> str:
    """Return the first line of a library's error message; the error's type if the message is empty."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
