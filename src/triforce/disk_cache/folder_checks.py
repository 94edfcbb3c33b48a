"""Checks of a folder for a disk cache: owned by the user, no link, closed to others, without other files, local."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from triforce.errors import CacheError, argument, printable
from triforce.whole_file import why_unwritable

NETWORK = ("nfs", "cifs", "smb", "fuse")
"""Prefixes of file systems whose locks, renames or owners may differ from those of a local disk."""


def file_system(descriptor: int) -> str:
    """Return the name of an open file's file system, such as `ext4`; "" where the system does not say."""
    try:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    mount = dict(line.partition(":")[::2] for line in facts.splitlines()).get("mnt_id", "").strip()
    mounted = (line.partition(" - ") for line in mounts)
    return next((kind.split()[0] for head, _, kind in mounted if head.split()[0] == mount), "")


SECRET = "secret"
STATE = "state"
MANIFEST = "manifest"
SUFFIX = ".kv"
PARTIAL = ".partial"
NAME_DIGITS = 40
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CACHE_NAME = re.compile(
    rf"[0-9a-f]{{{NAME_DIGITS}}}{re.escape(SUFFIX)}|{SECRET}|{STATE}|{MANIFEST}|.*{re.escape(PARTIAL)}", re.S
)
"""Names of a disk cache's files."""


def cache_files(names: Collection[str]) -> set[str]:
    """Return the names of a disk cache's files, of all `names` in a folder; none where the folder is no disk cache."""
    return set(filter(_CACHE_NAME.fullmatch, names)) if {SECRET, STATE} <= set(names) else set()


ADVICE = "name a folder, not a link, inside a folder that exists"
OWNER_ADVICE = "name a folder of yours, or a new one inside a folder that you may write to"


def open_checked(path: Path, network: bool, create: bool) -> int:
    """Return a descriptor of a folder that is fit for a disk cache. Raises CacheError saying what is wrong with it.

    network: accept NFS, CIFS and FUSE. create: accept a new or empty folder, and make it where there is none.
    """
    try:
        if create:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        descriptor = os.open(path, FOLDER_FLAGS)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        advice = OWNER_ADVICE if isinstance(error, PermissionError) else ADVICE
        raise _refusal(path, getattr(error, "strerror", str(error)), advice) from error
    try:
        _require_private(path, descriptor, create)
        _require_local(path, descriptor, network)
    except OSError as error:
        os.close(descriptor)
        raise _refusal(path, str(error.strerror)) from error
    except CacheError:
        os.close(descriptor)
        raise
    return descriptor


def require_usable(path: Path, network: bool) -> None:
    """Raises CacheError where a folder is not fit for a disk cache. It makes no folder."""
    if os.path.lexists(path):
        os.close(open_checked(path, network, create=True))
        return
    try:
        os.stat(path.parent)
    except PermissionError as error:
        raise _refusal(path, str(error.strerror), OWNER_ADVICE) from error
    except (OSError, ValueError):
        pass
    if "\0" in str(path) or not os.path.isdir(path.parent):
        raise _refusal(path, "neither this folder nor its parent exists")
    if reason := why_unwritable(path.parent):
        raise _refusal(path, reason, OWNER_ADVICE)


def names_in(descriptor: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the stat of each file in a folder. Raises OSError."""
    scan_descriptor = os.open(".", FOLDER_FLAGS, dir_fd=descriptor)  # a descriptor with a scan position of its own
    try:
        with os.scandir(scan_descriptor) as names:
            for entry in names:
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)
    finally:
        os.close(scan_descriptor)


def _refusal(path: Path, reason: str, advice: str = ADVICE) -> CacheError:
    return CacheError(f"{printable(path)} cannot be a disk cache ({reason}); {advice}")


def _require_private(path: Path, descriptor: int, create: bool) -> None:
    facts = os.fstat(descriptor)
    names = [name for name, _ in names_in(descriptor)]
    shown = printable(path)
    is_cache = SECRET in names
    if not (create or is_cache):
        raise CacheError(f"{shown} is not a disk cache; name the FOLDER of {argument('disk_cache')}")
    if facts.st_uid != os.geteuid():
        raise CacheError(f"{shown} is another user's folder; a disk cache holds prompts: name one of your own")
    if facts.st_mode & 0o077:
        advice = "chmod 700 it" if is_cache else "name a new folder"
        raise CacheError(f"{shown} is open to other users, and a disk cache holds prompts; {advice}")
    if not is_cache and not all(_CACHE_NAME.fullmatch(name) for name in names):
        raise CacheError(f"{shown} holds other files; name a new folder for the disk cache, or an empty one")


def _require_local(path: Path, descriptor: int, network: bool) -> None:
    kind = file_system(descriptor)
    if kind.startswith(NETWORK) and not network:
        raise CacheError(
            f"{printable(path)} lies on {kind}, whose locks and owners are not reliable; name a local folder, "
            f"or add {argument('disk_cache_network', True)}"
        )
