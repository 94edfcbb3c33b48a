"""CacheFolder: a folder that is its owner's alone. Files in it are reached by its descriptor, and no link is followed.

`secret` holds 32 bytes, under which names are made. `state` holds two numbers, and its lock is the folder's. Both end
in a checksum. `manifest` says which folders were read on purpose (see `disk_cache.manifest`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from zlib import crc32

from triforce.disk_cache.mounts import NETWORK, file_system
from triforce.errors import CacheError

SECRET, STATE, MANIFEST, PARTIAL = "secret", "state", "manifest", ".partial"
SECRET_BYTES = 32
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NUMBERS = struct.Struct("<QQ")
_CHECKSUM = 4
LOG = logging.getLogger("triforce.disk_cache")


@dataclass(slots=True)
class FolderState:
    """Numbers that processes share, under the folder's lock. They are hints: a scan of the folder puts them right."""

    order: int = 0
    """The latest place in the order of use; 0: nothing is known. No clock is asked."""
    bytes: int = 0
    """Bytes of all entries, or more."""


class CacheFolder:
    """An open folder, mode 0700, of the user who runs this process. Raises CacheError saying what is wrong with it.

    path: a new folder, an empty one, or one that was made here. network: take one on NFS, CIFS or FUSE, too. create:
    else it must be one that was made here.
    """

    def __init__(self, path: Path, network: bool = False, *, create: bool = True) -> None:
        self.path = path
        self._open_files: list[int] = []
        self._mutex = Lock()  # a lock on a file is the process's, and threads share it
        try:
            if create:
                with suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            self._folder = os.open(path, _FOLDER)
            self._open_files.append(self._folder)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be a disk cache ({error.strerror}); name a folder, not a link, in one that exists"
            ) from error
        try:
            self._require_private(create)
            self._require_local(network)
            self._state = self.open(STATE, os.O_RDWR | os.O_CREAT)
            self._open_files.append(self._state)
            with self.locked():
                self.secret = self._read_secret()
        except OSError as error:
            self.close()
            raise CacheError(f"{path} cannot be a disk cache ({error}); name another folder") from error
        except CacheError:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder. Nothing else may be called then."""
        while self._open_files:
            os.close(self._open_files.pop())

    @contextmanager
    def locked(self) -> Iterator[FolderState]:
        """Hold the folder against all other processes and threads; changes of the state are kept. Raises OSError."""
        with self._mutex:
            fcntl.flock(self._state, fcntl.LOCK_EX)
            try:
                held = _checked(os.pread(self._state, _NUMBERS.size + _CHECKSUM, 0))
                state = FolderState(*_NUMBERS.unpack(held)) if len(held) == _NUMBERS.size else FolderState()
                yield state
                os.pwrite(self._state, _sealed(_NUMBERS.pack(state.order, state.bytes)), 0)
            finally:
                fcntl.flock(self._state, fcntl.LOCK_UN)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield names and facts of all files but `secret`, `state` and `manifest`. Raises OSError."""
        again = os.open(".", _FOLDER, dir_fd=self._folder)  # its own place in the list
        try:
            with os.scandir(again) as found:
                for entry in found:
                    if entry.name not in (SECRET, STATE, MANIFEST):
                        with suppress(FileNotFoundError):
                            yield entry.name, entry.stat(follow_symlinks=False)
        finally:
            os.close(again)

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
        return self.place(name) >= 0

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a regular file that is its owner's alone. Raises OSError for any other."""
        descriptor = os.open(name, flags | _FILE, 0o600, dir_fd=self._folder)
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
            return descriptor
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"{name} is not a file of this user's alone")

    def read(self, name: str) -> bytes:
        """Return what a file holds. Raises OSError."""
        with open(self.open(name), "rb") as file:
            return file.read()

    def replace(self, name: str, data: bytes) -> None:
        """Let a file hold this, whole or as it was before. The folder is locked. Raises OSError."""
        partial = f"{name}{PARTIAL}"
        self.remove(partial)
        with open(self.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.rename(partial, name)

    def rename(self, name: str, new: str) -> None:
        """Give a whole file its name, so that it survives a loss of power. Raises OSError."""
        os.rename(name, new, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def remove(self, name: str) -> None:
        """Unlink a file, if it is still there. Whoever has it open reads on. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def place(self, name: str) -> int:
        """Return the place of a file in the order of use; -1 where there is no file."""
        try:
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime_ns
        except OSError:
            return -1

    def mark(self, name: str, place: int) -> None:
        """Set the place of a file in the order of use, if it is still there. Raises OSError."""
        with suppress(FileNotFoundError):
            os.utime(name, ns=(place, place), dir_fd=self._folder, follow_symlinks=False)

    def _require_private(self, create: bool) -> None:
        facts, ours = os.fstat(self._folder), self.has(SECRET)
        if not (create or ours):
            raise CacheError(f"{self.path} is not a disk cache; name the FOLDER of --disk-cache")
        if facts.st_uid != os.geteuid():
            raise CacheError(f"{self.path} is another user's folder; a disk cache holds prompts: name one of your own")
        if facts.st_mode & 0o077:
            advice = "chmod 700 it" if ours else "name a new folder"
            raise CacheError(f"{self.path} is open to other users, and a disk cache holds prompts; {advice}")
        if not ours and any(not name.endswith(PARTIAL) for name, _ in self.files()):
            raise CacheError(f"{self.path} holds other files; name a new folder for the disk cache, or an empty one")

    def _require_local(self, network: bool) -> None:
        kind = file_system(self._folder)
        if kind.startswith(NETWORK) and not network:
            raise CacheError(
                f"{self.path} lies on {kind}, whose locks and owners may not hold; name a folder on a local disk, or "
                "add --disk-cache-network"
            )

    def _read_secret(self) -> bytes:
        """Return the secret; make it where there is none. The folder is locked.

        Under another secret nobody finds what is kept: entries that were made under a damaged one are removed.
        """
        there = self.has(SECRET)
        secret = _checked(self.read(SECRET)) if there else b""
        if len(secret) == SECRET_BYTES:
            return secret
        if there:
            LOG.warning("disk cache: the secret in %s is damaged; what was kept under it is removed", self.path)
            for name, _ in list(self.files()):
                self.remove(name)
        secret = secrets.token_bytes(SECRET_BYTES)
        self.replace(SECRET, _sealed(secret))
        return secret


def _sealed(data: bytes) -> bytes:
    """Return data with its checksum behind it."""
    return data + crc32(data).to_bytes(_CHECKSUM, "little")


def _checked(held: bytes) -> bytes:
    """Return the data that was sealed; nothing where it is not as it was."""
    data = held[:-_CHECKSUM]
    return data if held == _sealed(data) else b""
