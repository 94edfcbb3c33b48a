"""CacheFolder: a folder that only its owner can access. Files in it are opened by its descriptor; no link is followed.

`secret` holds 32 bytes, the key of the names' HMAC. `state` holds two numbers, and its lock is the folder's lock. Both
end in a checksum. `manifest` lists the folders that were read by `triforce watch` (see `disk_cache.documents`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from zlib import crc32

from triforce.disk_cache.folder_checks import MANIFEST, PARTIAL, SECRET, STATE, SUFFIX, names_in, open_checked
from triforce.errors import CacheError, printable

LOCK_SECONDS = 5.0
"""Seconds to wait for a lock that another process holds."""
POLL_SECONDS = 0.01
"""Seconds between two attempts to take a lock."""
MOST_ORDER = 1 << 33
"""Largest number in the order of use: the place of a larger one does not fit into a file's time stamp."""
_NUMBERS = struct.Struct("<QQ")
_MOST_NUMBER = (1 << 64) - 1
_CHECKSUM = 4


@dataclass(slots=True)
class FolderState:
    """Numbers that processes share, under the folder's lock. They are hints: a scan of the folder corrects them."""

    order: int = 0
    """Latest number in the order of use, a count and not a time; 0: unknown."""
    bytes: int = 0
    """Upper bound of the bytes of all entries."""


def read_state(descriptor: int) -> FolderState:
    """Return the numbers in a file; zeros where they are damaged. Raises OSError."""
    packed_numbers = unsealed(os.pread(descriptor, _NUMBERS.size + _CHECKSUM, 0))
    state = FolderState(*_NUMBERS.unpack(packed_numbers)) if len(packed_numbers) == _NUMBERS.size else FolderState()
    return state if state.order <= MOST_ORDER else FolderState()


def write_state(descriptor: int, state: FolderState) -> None:
    """Write the numbers to a file. Raises OSError."""
    os.pwrite(descriptor, sealed(_NUMBERS.pack(state.order, min(state.bytes, _MOST_NUMBER))), 0)


def take_lock(descriptor: int, seconds: float) -> bool:
    """Lock a file against all other processes. Returns whether the lock was taken within `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(POLL_SECONDS)


def release_lock(descriptor: int) -> None:
    """Unlock a file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def sealed(data: bytes) -> bytes:
    """Return data followed by its checksum."""
    return data + crc32(data).to_bytes(_CHECKSUM, "little")


def unsealed(sealed_data: bytes) -> bytes:
    """Return the data that was sealed; empty where the checksum does not hold."""
    data = sealed_data[:-_CHECKSUM]
    return data if sealed_data == sealed(data) else b""


SECRET_BYTES = 32
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
LOG = logging.getLogger("triforce.disk_cache")


class CacheFolder:
    """An open folder, mode 0700, of the user who runs this process. Raises CacheError saying what is wrong with it.

    path: a new folder, an empty one, or a disk cache. network: accept a folder on NFS, CIFS or FUSE. create: accept a
    new or empty folder; without it the folder must be a disk cache. A folder that is deleted is made anew when it is
    locked next. If another process holds the lock of a new folder for too long, this process neither finds nor stores
    entries until the lock is free.
    """

    def __init__(self, path: Path, network: bool = False, *, create: bool = True) -> None:
        self.path = path
        self._network = network
        self._create = create
        self._mutex = Lock()  # a file's lock belongs to the process: threads share it
        self._patience = LOCK_SECONDS
        self._provisional = False  # whether the secret is not in the folder
        self._folder = open_checked(path, network, create)
        self._open_files = [self._folder]
        try:
            self._state = self.open(STATE, os.O_RDWR | os.O_CREAT)
            self._open_files.append(self._state)
            self.secret = self._read_secret()
            self.secret = self.secret or self._secret_at_opening()
        except OSError as error:
            self.close()
            raise CacheError(f"{printable(path)} cannot be a disk cache ({error}); name another folder") from error

    def close(self) -> None:
        """Close the folder. No other method may be called afterwards."""
        while self._open_files:
            os.close(self._open_files.pop())

    @contextmanager
    def locked(self) -> Iterator[FolderState]:
        """Lock the folder against all other processes and threads. Changes of the yielded state are written back.

        Raises OSError for a folder that was deleted, and for one that another process locks for too long.
        """
        with self._mutex:
            secret_before = self.secret
            self._renew()
            if self.secret != secret_before:
                raise OSError(f"{printable(self.path)} was deleted, and is made anew")
            self._take_lock()
            try:
                if self._provisional:
                    self.secret = self._ensure_secret()
                    self._provisional = False
                    raise OSError(f"{printable(self.path)} was locked when it was opened, and is used from now on")
                state = read_state(self._state)
                yield state
                write_state(self._state, state)
            finally:
                release_lock(self._state)

    def _take_lock(self) -> None:
        """Lock the folder. Raises TimeoutError. After one timeout it does not wait again until the lock is free."""
        if not take_lock(self._state, self._patience):
            self._patience = 0.0
            raise TimeoutError(f"{printable(self.path)} is locked by another process for over {LOCK_SECONDS:g} s")
        self._patience = LOCK_SECONDS

    def renew(self) -> None:
        """Make the folder anew, with a new secret, if it was deleted or emptied. Raises OSError."""
        with self._mutex:
            self._renew()

    def _renew(self) -> None:
        """Open the folder anew where it was deleted or emptied; make it if it is missing. Raises OSError.

        Descriptors keep their numbers, as other threads use them.
        """
        if os.fstat(self._state).st_nlink:
            return
        try:
            state = self.open(STATE, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            try:
                os.dup2(folder := open_checked(self.path, self._network, self._create), self._folder, inheritable=False)
            except CacheError as error:
                raise OSError(str(error)) from error
            os.close(folder)
            state = self.open(STATE, os.O_RDWR | os.O_CREAT)
        os.dup2(state, self._state, inheritable=False)
        os.close(state)
        self._take_lock()
        try:
            self.secret = self._ensure_secret()
            self._provisional = False
        finally:
            release_lock(self._state)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield names and facts of all files but `secret`, `state` and `manifest`. Raises OSError."""
        return (entry for entry in names_in(self._folder) if entry[0] not in (SECRET, STATE, MANIFEST))

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return self.place(name) >= 0

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a regular file that only its owner can access. Raises OSError for any other file."""
        descriptor = os.open(name, flags | _FILE, 0o600, dir_fd=self._folder)
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
            return descriptor
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"{name} is not a file of this user's alone")

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the bytes of a file; none of a file that is larger than `max_bytes` bytes. Raises OSError."""
        with open(self.open(name), "rb") as file:
            return file.read(max_bytes) if os.fstat(file.fileno()).st_size <= max_bytes else b""

    def replace(self, name: str, data: bytes) -> None:
        """Replace a file's bytes atomically. The caller holds the folder's lock. Raises OSError."""
        partial = f"{name}{PARTIAL}"
        self.remove(partial)
        with open(self.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.rename(partial, name)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, so that the new name survives a loss of power. Raises OSError."""
        os.rename(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def remove(self, name: str) -> None:
        """Unlink a file, if it is still there. Open descriptors of it stay valid. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def place(self, name: str) -> int:
        """Return the place of a file in the order of use, its file time in nanoseconds; -1 where there is no file."""
        try:
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime_ns
        except OSError:
            return -1

    def mark(self, name: str, place: int) -> None:
        """Set the place of a file in the order of use, if it is still there. Raises OSError."""
        with suppress(FileNotFoundError):
            os.utime(name, ns=(place, place), dir_fd=self._folder, follow_symlinks=False)

    def _read_secret(self) -> bytes:
        """Return the folder's secret; empty where there is none, or it is damaged. Raises OSError."""
        if not self.has(SECRET):
            return b""
        secret = unsealed(self.read(SECRET, len(sealed(bytes(SECRET_BYTES)))))
        return secret if len(secret) == SECRET_BYTES else b""

    def _secret_at_opening(self) -> bytes:
        """Return the secret of a folder that had none at opening: a new one, or that of another process.

        While another process locks the folder the secret is provisional, known to this process only. Raises OSError.
        """
        try:
            with self.locked():
                return self._ensure_secret()
        except TimeoutError:  # answers go on; the next write logs it
            if not self._create:
                raise
        self._provisional = True
        return secrets.token_bytes(SECRET_BYTES)

    def _ensure_secret(self) -> bytes:
        """Return the folder's secret, after making one if there is none or it is damaged. Raises OSError.

        The caller holds the folder's lock. Entries of a lost secret cannot be found any more, and are removed.
        """
        if secret := self._read_secret():  # another process was first
            return secret
        names = [name for name, _ in self.files()]
        if self.has(SECRET) or any(name.endswith(SUFFIX) for name in names):
            where = printable(self.path)
            LOG.warning("disk cache: the secret in %s is damaged or gone; what was kept under it is removed", where)
            for name in names:
                with suppress(OSError):
                    self.remove(name)
        secret = secrets.token_bytes(SECRET_BYTES)
        self.replace(SECRET, sealed(secret))
        return secret
