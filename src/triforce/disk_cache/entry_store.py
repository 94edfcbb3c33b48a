"""EntryStore: entries of a folder by name, within a limit of bytes.

Readers take no lock. Any number of processes may write.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple

from triforce.disk_cache.entry import LENGTH_BYTES, DamagedEntry, Entry, header, header_length, packed, unpacked
from triforce.disk_cache.folder import LOG, MOST_ORDER, CacheFolder, FolderState
from triforce.disk_cache.folder_checks import MANIFEST, NAME_DIGITS, PARTIAL, SUFFIX

SECOND = 10**9
"""Nanoseconds between the places of two successive uses. A *place* is a file time that orders entries by their use."""
REUSED = SECOND // 2
"""The place of a reused entry has at least this number of nanoseconds beside its whole seconds."""
PROTECTED_SHARE = 0.8
"""Share of the limit within which reused entries are protected from eviction."""
EVICTION_SHARE = 1 / 16
"""Share of the limit that an eviction frees."""


class StoredEntry(NamedTuple):
    """An entry in the folder: its name, its bytes, and its place in the order of use."""

    name: str
    bytes: int
    place: int


def place_of(order: int, index: int, reused: bool) -> int:
    """Return the place of entry `index` of a text, a file time in nanoseconds.

    Its seconds are `order`, the number of the use. Its nanoseconds are at least `REUSED` if the text was used before
    (`reused`), and higher for a smaller `index`, so that ends of texts are evicted before their beginnings.
    """
    return order * SECOND + REUSED * reused + REUSED - 1 - min(index, REUSED - 1)


def order_of(place: int) -> int:
    """Return the `order` of a place: the number of the use."""
    return place // SECOND


def entries_to_evict(entries: Sequence[StoredEntry], max_bytes: float) -> list[StoredEntry]:
    """Return the entries to evict so that the others hold at most `max_bytes` bytes, the first to evict first.

    Reused entries stay, up to `PROTECTED_SHARE` of the bytes, so that large texts that are read once do not empty the
    cache.
    """
    excess_bytes = sum(entry.bytes for entry in entries) - max_bytes
    protected_bytes = 0
    protected = set()
    for entry in sorted(entries, key=lambda entry: -entry.place):
        if entry.place % SECOND >= REUSED and protected_bytes + entry.bytes <= PROTECTED_SHARE * max_bytes:
            protected_bytes += entry.bytes
            protected.add(entry.name)
    dropped = []
    for entry in sorted(entries, key=lambda entry: (entry.name in protected, entry.place)):
        if excess_bytes <= 0:
            break
        excess_bytes -= entry.bytes
        dropped.append(entry)
    return dropped


_UNREADABLE = {errno.EACCES, errno.EIO, errno.EISDIR, errno.ELOOP, errno.EPERM}
"""Errors of an entry that will never be readable."""


@dataclass(slots=True)
class Use:
    """One use of the store, by the texts of a request. All entries that they read or write get its number."""

    order: int = 0
    """Number of the use: uses of the folder are counted. 0: not assigned yet."""


class Cleared(NamedTuple):
    """Count of entries and bytes that were removed, and names of files that could not be removed."""

    entries: int
    bytes: int
    remaining: list[str]


class EntryStore:
    """The entries of a folder, at most `limit` bytes. Entries are evicted where there are more."""

    def __init__(self, folder: CacheFolder, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._scanned = False
        self._unremovable = set[str]()  # damaged entries that cannot be removed, and have been logged

    def name(self, *parts: bytes) -> str:
        """Return a name for these parts, an HMAC with the folder's secret: 40 hex digits and a suffix."""
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self.folder.secret, text, "sha256").hex()[:NAME_DIGITS] + SUFFIX

    def read(self, name: str) -> Entry | None:
        """Return an entry whose checksum holds, or None. A damaged entry is logged and removed."""
        if name in self._unremovable:
            return None
        try:
            return self._read_checked(name)
        except FileNotFoundError:
            return None
        except DamagedEntry as error:
            LOG.warning("disk cache: entry %s is damaged (%s) and is removed; its tokens are prefilled", name, error)
            try:
                self.folder.remove(name)
            except OSError:
                self._unremovable.add(name)
        except (OSError, MemoryError) as error:
            reason = str(error) or "there is not enough memory"
            LOG.warning("disk cache: entry %s cannot be read (%s); its tokens are prefilled", name, reason)
        return None

    def read_ahead(self, names: Iterable[str]) -> Iterator[Entry | None]:
        """Yield `read(name)` of each name, while another thread reads and checks the next entry."""
        with ThreadPoolExecutor(1, "disk-cache-reader") as reader:
            pending_read: Future[Entry | None] | None = None
            for name in names:
                previous_read = pending_read
                pending_read = reader.submit(self.read, name)
                if previous_read:
                    yield previous_read.result()
            if pending_read:
                yield pending_read.result()

    def fault(self, name: str) -> str | None:
        """Return the fault of an entry; None where it has none, or is gone. Raises OSError."""
        try:
            self._read_checked(name)
        except FileNotFoundError:
            return None
        except DamagedEntry as error:
            return str(error)
        return None

    def facts(self, name: str) -> dict[str, str] | None:
        """Return the facts of an entry's header, without a check of its tensors; None where there is no entry."""
        with suppress(OSError, DamagedEntry), open(self.folder.open(name), "rb", buffering=0) as file:
            return header(memoryview(_beginning(file))).facts
        return None

    def write(self, name: str, entry: Entry, use: Use, index: int, *, replace: bool = False) -> None:
        """Write an entry, whole or not at all. Raises OSError.

        index: index of the entry in its text. replace: replace an existing entry; else it is only marked as used.
        """
        if self.folder.has(name) and not replace:
            return self.touch(name, use, index)
        pieces = packed(Entry({**entry.facts, "name": name}, entry.parts))
        size = sum(len(piece) for piece in pieces)
        if size > self.limit:
            raise OSError(errno.EFBIG, "an entry is larger than the disk cache may be")
        partial = f"{name}.{secrets.token_hex(8)}{PARTIAL}"
        with ExitStack() as files:
            try:
                with self.folder.locked() as state:
                    self._make_room(state, size)
                    self._assign_order(state, use)
                    descriptor = self.folder.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                    files.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)  # scans leave a locked file alone: its writer lives
                    os.ftruncate(descriptor, size)  # so that scans count it
                    state.bytes += size
                for piece in pieces:
                    _write_all(descriptor, piece)
                self.folder.mark(partial, place_of(use.order, index, reused=False))
                os.fsync(descriptor)
                with self.folder.locked(), suppress(FileNotFoundError):  # the folder may have been emptied meanwhile
                    self.folder.rename(partial, name)  # under the lock, so that a scan finds exactly one of both names
            except BaseException:
                with suppress(OSError):
                    self.folder.remove(partial)
                raise

    def touch(self, name: str, use: Use, index: int) -> None:
        """Move an entry of an earlier use to the end of the order of use, if it is still there. Raises OSError."""
        if not use.order:
            with self.folder.locked() as state:
                self._make_room(state, 0)
                self._assign_order(state, use)
        if order_of(self.folder.place(name)) != use.order:
            self.folder.mark(name, place_of(use.order, index, reused=True))

    def entries(self) -> list[StoredEntry]:
        """Return all entries, damaged ones too. Raises OSError."""
        with self.folder.locked():
            return self._scan()[0]

    def clear(self) -> Cleared:
        """Remove all entries and the manifest, and skip files that cannot be removed. Raises OSError."""
        with self.folder.locked() as state:
            entries, partial_bytes = self._scan()
            with suppress(OSError):
                self.folder.remove(MANIFEST)
            self._drop(entries)
            remaining_entries = [entry for entry in entries if self.folder.has(entry.name)]
            size = sum(entry.bytes for entry in remaining_entries)
            state.bytes = partial_bytes + size
        names = [entry.name for entry in remaining_entries] + [MANIFEST] * self.folder.has(MANIFEST)
        return Cleared(len(entries) - len(remaining_entries), sum(entry.bytes for entry in entries) - size, names)

    def _read_checked(self, name: str) -> Entry:
        """Return an entry whose checksum holds. Raises DamagedEntry or OSError.

        Memory is allocated only after the header's size has been compared with the file's size.
        """
        try:
            with open(self.folder.open(name), "rb", buffering=0) as file:
                beginning = _beginning(file)
                size = header(memoryview(beginning)).size
                if size != os.fstat(file.fileno()).st_size:
                    raise DamagedEntry("its size is not that of its header")
                content = bytearray(size)
                content[: len(beginning)] = beginning[:size]
                unread_content = memoryview(content)[len(beginning) :]
                if file.readinto(unread_content) != len(unread_content):
                    raise DamagedEntry("it is cut short")
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise DamagedEntry(error.strerror or "it cannot be read") from error
            raise
        entry = unpacked(content)
        if entry.facts.get("name") != name:
            raise DamagedEntry("it records the name of another entry")
        return entry

    def _make_room(self, state: FolderState, size: int) -> None:
        """Evict entries until `size` more bytes fit. The caller holds the folder's lock.

        The folder is scanned at the first write of this process, if its state is unknown, and if too little room is
        left according to its state.
        """
        if self._scanned and state.order and state.bytes + size <= self.limit:
            return
        entries, partial_bytes = self._scan()
        total = partial_bytes + sum(entry.bytes for entry in entries)
        evicted = (
            entries_to_evict(entries, self.limit * (1 - EVICTION_SHARE) - partial_bytes - size)
            if total + size > self.limit
            else []
        )
        self._drop(evicted)
        state.bytes = total - sum(entry.bytes for entry in evicted if not self.folder.has(entry.name))
        state.order = max([state.order, *(order_of(entry.place) for entry in entries)])
        self._scanned = True

    def _drop(self, entries: list[StoredEntry]) -> None:
        """Remove entries, and skip files that cannot be removed."""
        for entry in entries:
            with suppress(OSError):
                self.folder.remove(entry.name)

    def _scan(self) -> tuple[list[StoredEntry], int]:
        """Return all entries, and the bytes of entries that are being written; remove files of dead writers.

        The caller holds the folder's lock, under which every write begins and ends.
        """
        entries = []
        partial_bytes = 0
        for name, facts in self.folder.files():
            if name.endswith(SUFFIX):
                credible = 0 <= order_of(facts.st_mtime_ns) <= MOST_ORDER and facts.st_size <= self.limit
                entries.append(
                    StoredEntry(name, facts.st_size, facts.st_mtime_ns if credible else 0)
                )  # place 0 is evicted first
            elif name.endswith(PARTIAL) and not self._remove_abandoned(name):
                partial_bytes += facts.st_size
        return entries, partial_bytes

    def _remove_abandoned(self, name: str) -> bool:
        """Remove a partial file unless its writer lives. Returns whether it is gone."""
        with suppress(OSError):
            descriptor = self.folder.open(name, os.O_RDWR)  # NFS locks no file that is open for reading only
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.folder.remove(name)
            finally:
                os.close(descriptor)
        return not self.folder.has(name)

    @staticmethod
    def _assign_order(state: FolderState, use: Use) -> None:
        if not use.order:
            state.order += 1
            use.order = state.order


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    unwritten = memoryview(piece)
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]


def _beginning(file: FileIO) -> bytes:
    """Return the length of a header and the header. Raises OSError."""
    length = file.read(LENGTH_BYTES)
    return length + file.read(header_length(length) - LENGTH_BYTES)
