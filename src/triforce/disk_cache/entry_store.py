"""EntryStore: entries of a folder by name. Readers take no lock; writers, in any number of processes, keep the size."""

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

from triforce.disk_cache.entry import LENGTH, DamagedEntry, Entry, header, header_length, packed, unpacked
from triforce.disk_cache.folder import LOG, MOST_ORDER, CacheFolder, FolderState
from triforce.disk_cache.folder_checks import MANIFEST, NAME_DIGITS, PARTIAL, SUFFIX

SECOND = 10**9
AGAIN = SECOND // 2
PROTECTED = 0.8
"""Share of the size that entries which were used again may hold against new ones."""
ROOM = 1 / 16
"""Share of the size that is made free at a time."""


class Held(NamedTuple):
    """An entry that is there."""

    name: str
    bytes: int
    place: int


def place_of(order: int, index: int, again: bool) -> int:
    """Return the place of entry `index` of a text, at a use of the folder; again: the text was used before."""
    return order * SECOND + AGAIN * again + AGAIN - 1 - min(index, AGAIN - 1)


def order_of(place: int) -> int:
    """Return the use of the folder that a place is of."""
    return place // SECOND


def to_drop(entries: Sequence[Held], most: float) -> list[Held]:
    """Return entries to give up so that the others hold at most so many bytes.

    So many large texts that are read once do not empty the cache: those that were used again stay, up to their share.
    """
    left = sum(entry.bytes for entry in entries) - most
    shielded = 0
    protected = set()
    for entry in sorted(entries, key=lambda entry: -entry.place):
        if entry.place % SECOND >= AGAIN and shielded + entry.bytes <= PROTECTED * most:
            shielded += entry.bytes
            protected.add(entry.name)
    dropped = []
    for entry in sorted(entries, key=lambda entry: (entry.name in protected, entry.place)):
        if left <= 0:
            break
        left -= entry.bytes
        dropped.append(entry)
    return dropped


_UNREADABLE = {errno.EACCES, errno.EIO, errno.EISDIR, errno.ELOOP, errno.EPERM}
"""Errors of an entry that nobody will be able to read."""


@dataclass(slots=True)
class Use:
    """One text's use of the store: all of its entries have one place in the order."""

    order: int = 0
    """0: none yet."""


class Cleared(NamedTuple):
    """Entries and bytes that were removed, and names of what could not be."""

    entries: int
    bytes: int
    left: list[str]


class EntryStore:
    """The entries of a folder, of at most so many bytes. Where there are more, some are given up."""

    def __init__(self, folder: CacheFolder, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._scanned = False
        self._hopeless = set[str]()  # damaged entries that cannot be removed, and are told

    def name(self, *parts: bytes) -> str:
        """Return a name for these parts, an HMAC under the folder's secret: 40 hex digits and a suffix."""
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self.folder.secret, text, "sha256").hex()[:NAME_DIGITS] + SUFFIX

    def read(self, name: str) -> Entry | None:
        """Return a whole entry, or None where there is none. One that is damaged is told in the log, and removed."""
        if name in self._hopeless:
            return None
        try:
            return self._whole(name)
        except FileNotFoundError:
            return None
        except DamagedEntry as error:
            LOG.warning("disk cache: entry %s is damaged (%s) and is removed; its tokens are read again", name, error)
            try:
                self.folder.remove(name)
            except OSError:
                self._hopeless.add(name)
        except (OSError, MemoryError) as error:
            why = str(error) or "there is not enough memory"
            LOG.warning("disk cache: entry %s cannot be read (%s); its tokens are read again", name, why)
        return None

    def read_ahead(self, names: Iterable[str]) -> Iterator[Entry | None]:
        """Yield what `read` returns of each name, while another thread reads and checks the next one."""
        with ThreadPoolExecutor(1, "disk-cache-reader") as reader:
            coming: Future[Entry | None] | None = None
            for name in names:
                before = coming
                coming = reader.submit(self.read, name)
                if before:
                    yield before.result()
            if coming:
                yield coming.result()

    def fault(self, name: str) -> str | None:
        """Return the fault of an entry; None where it is whole, or gone. Raises OSError."""
        try:
            self._whole(name)
        except FileNotFoundError:
            return None
        except DamagedEntry as error:
            return str(error)
        return None

    def facts(self, name: str) -> dict[str, str] | None:
        """Return the facts of an entry without a look at its tensors; None where it is gone, or none."""
        with suppress(OSError, DamagedEntry), open(self.folder.open(name), "rb", buffering=0) as file:
            return header(memoryview(_beginning(file))).facts
        return None

    def write(self, name: str, entry: Entry, use: Use, index: int, *, replace: bool = False) -> None:
        """Keep an entry, whole or not at all. index: its place in its text. Raises OSError.

        One that is there is kept, or replaced.
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
                    self._take_place(state, use)
                    descriptor = self.folder.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                    files.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)  # while its writer lives, nobody takes it for a remainder
                    os.ftruncate(descriptor, size)  # so that scans count it
                    state.bytes += size
                for piece in pieces:
                    _write_all(descriptor, piece)
                self.folder.mark(partial, place_of(use.order, index, again=False))
                os.fsync(descriptor)
                with self.folder.locked(), suppress(FileNotFoundError):  # of a folder that was emptied meanwhile
                    self.folder.rename(partial, name)  # under the lock, so that a scan finds it under one of its names
            except BaseException:
                with suppress(OSError):
                    self.folder.remove(partial)
                raise

    def touch(self, name: str, use: Use, index: int) -> None:
        """Move an entry that another use has written to the end of the order, if it is still there. Raises OSError."""
        if not use.order:
            with self.folder.locked() as state:
                self._make_room(state, 0)
                self._take_place(state, use)
        if order_of(self.folder.place(name)) != use.order:
            self.folder.mark(name, place_of(use.order, index, again=True))

    def held(self) -> list[Held]:
        """Return all entries, whole or not. Raises OSError."""
        with self.folder.locked():
            return self._scan()[0]

    def clear(self) -> Cleared:
        """Remove all entries and the manifest, and go on behind what cannot be removed. Raises OSError."""
        with self.folder.locked() as state:
            entries, coming = self._scan()
            with suppress(OSError):
                self.folder.remove(MANIFEST)
            self._drop(entries)
            left = [entry for entry in entries if self.folder.has(entry.name)]
            size = sum(entry.bytes for entry in left)
            state.bytes = coming + size
        names = [entry.name for entry in left] + [MANIFEST] * self.folder.has(MANIFEST)
        return Cleared(len(entries) - len(left), sum(entry.bytes for entry in entries) - size, names)

    def _whole(self, name: str) -> Entry:
        """Return an entry. Memory is taken for what its header says, if the file is as large. Raises DamagedEntry or
        OSError.
        """
        try:
            with open(self.folder.open(name), "rb", buffering=0) as file:
                beginning = _beginning(file)
                size = header(memoryview(beginning)).size
                if size != os.fstat(file.fileno()).st_size:
                    raise DamagedEntry("its size is not that of its header")
                content = bytearray(size)
                content[: len(beginning)] = beginning[:size]
                rest = memoryview(content)[len(beginning) :]
                if file.readinto(rest) != len(rest):
                    raise DamagedEntry("it is cut short")
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise DamagedEntry(error.strerror or "it cannot be read") from error
            raise
        found = unpacked(content)
        if found.facts.get("name") != name:
            raise DamagedEntry("it has another's name")
        return found

    def _make_room(self, state: FolderState, size: int) -> None:
        """See that an entry of so many bytes fits; count what there is if nobody knows. The folder is locked."""
        if self._scanned and state.order and state.bytes + size <= self.limit:
            return
        entries, coming = self._scan()
        total = coming + sum(entry.bytes for entry in entries)
        dropped = to_drop(entries, self.limit * (1 - ROOM) - coming - size) if total + size > self.limit else []
        self._drop(dropped)
        state.bytes = total - sum(entry.bytes for entry in dropped if not self.folder.has(entry.name))
        state.order = max([state.order, *(order_of(entry.place) for entry in entries)])
        self._scanned = True

    def _drop(self, entries: list[Held]) -> None:
        """Remove entries, but those that cannot be removed."""
        for entry in entries:
            with suppress(OSError):
                self.folder.remove(entry.name)

    def _scan(self) -> tuple[list[Held], int]:
        """Return all entries, and the bytes of those that are being written; remove what dead writers have left.

        The folder is locked, as it is when a write begins.
        """
        entries = []
        coming = 0
        for name, facts in self.folder.files():
            if name.endswith(SUFFIX):
                credible = 0 <= order_of(facts.st_mtime_ns) <= MOST_ORDER and facts.st_size <= self.limit
                entries.append(Held(name, facts.st_size, facts.st_mtime_ns if credible else 0))  # else it goes first
            elif name.endswith(PARTIAL) and not self._remove_remainder(name):
                coming += facts.st_size
        return entries, coming

    def _remove_remainder(self, name: str) -> bool:
        """Remove a file unless its writer lives. Returns whether it is gone."""
        with suppress(OSError):
            descriptor = self.folder.open(name, os.O_RDWR)  # NFS locks no file that is open for reading alone
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.folder.remove(name)
            finally:
                os.close(descriptor)
        return not self.folder.has(name)

    @staticmethod
    def _take_place(state: FolderState, use: Use) -> None:
        if not use.order:
            state.order += 1
            use.order = state.order


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(descriptor, left) :]


def _beginning(file: FileIO) -> bytes:
    """Return the length of a header and the header. Raises OSError."""
    length = file.read(LENGTH)
    return length + file.read(header_length(length) - LENGTH)
