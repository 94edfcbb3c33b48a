"""Secret by which ranks that meet over a network recognise each other: of the environment, or of the user's cache."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from triforce.errors import RankError
from triforce.user_cache import user_cache

VARIABLE = "TRIFORCE_RANK_KEY"
"""Environment variable with the secret; ranks of several machines need it, unless they share a home folder."""
KEY_BYTES = 32
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def rank_key() -> bytes:
    """Return the secret of `VARIABLE`, else that of a file in the user's cache, which the first rank makes.

    Raises RankError if there is no such file and none can be made, or others can read it.
    """
    if secret := os.environ.get(VARIABLE):
        return secret.encode()
    advice = f"set {VARIABLE} to the same secret for all ranks"
    folder = user_cache()
    if folder is None:
        raise RankError(f"there is no home folder for the key by which ranks recognise each other; {advice}")
    path = folder / "rank-key"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _make_key(path)
        return _read_key(path)
    except OSError as error:
        raise RankError(f"{path}, the key of ranks, cannot be used ({error.strerror or error}); {advice}") from error


def _make_key(path: Path) -> None:
    """Make the file, unless another rank does so at the same time."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, _NEW, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read_key(path: Path) -> bytes:
    with open(os.open(path, _READ), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(0, "others can read it, or it has another owner")
        return file.read()
