"""WriteQueue: writes behind the answers, in a thread of its own, with bounds on the bytes that wait and on the rate."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.folder import LOG, CacheFolder
from triforce.disk_cache.folder_checks import require_usable
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError, argument, require_bool
from triforce.interface.byte_size import cache_size_of, named_path, size_of

MOST_BYTES = 256 << 20
"""Bytes that wait to be written."""
RATE = 512 << 20
"""Bytes written in a second, at most: the disk is for others, too."""
PATIENCE = 60.0
"""Seconds that the end of a process waits for what is queued."""

Write = Callable[[], None]


class WriteQueue:
    """Calls what it is given, in order. A call that fails costs itself and what is queued, and one log line.

    The same failure is told again once a call has succeeded since.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, rate: float = RATE) -> None:
        self._most = most_bytes
        self._rate = rate
        self._waiting: deque[tuple[Write, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None
        self.failures = 0
        self._told: tuple[type[Exception], int | str] | None = None  # the failure of the latest calls

    def has_room(self, size: int) -> bool:
        """Whether a call that writes so many bytes would be taken: one, however large, always is."""
        with self._changed:
            return self._open and (not self._bytes or self._bytes + size <= self._most)

    def offer(self, write: Write, size: int) -> bool:
        """Queue a call that writes so many bytes. Returns whether there was room."""
        with self._changed:
            if not self.has_room(size):
                return False
            self._waiting.append((write, size))
            self._bytes += size
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="triforce-disk-cache", daemon=True)
                self._thread.start()
        return True

    def wait(self, seconds: float = 0.05) -> bool:
        """Wait for a call to be done, but not longer than so many seconds. Returns whether calls are taken."""
        with self._changed:
            before = self._bytes
            self._changed.wait_for(lambda: self._bytes < before or not before, seconds)
            return self._open

    def flush(self, seconds: float = PATIENCE) -> bool:
        """Wait until nothing is queued. Returns whether that was so within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, seconds)

    def close(self, seconds: float = PATIENCE) -> bool:
        """Write what is queued, and end: nothing more is taken. Returns whether it was written in so many seconds."""
        written = self.flush(seconds)
        with self._changed:
            self._open = False
            self._changed.notify_all()
        if written and self._thread not in (None, threading.current_thread()):
            self._thread.join()  # an interpreter that ends kills threads which want its lock, at times with the process
        return written

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self._open)
                if not self._waiting:
                    return
                write, size = self._waiting.popleft()
            started = perf_counter()
            try:
                write()
                self._told = None
            except Exception as error:  # answers go on, whatever it is
                self._tell(error, 1 + self._drop_queued())
            self._done(size)
            with self._changed:
                pause = size / self._rate - (perf_counter() - started)
                self._changed.wait_for(lambda: not self._open, max(pause, 0))

    def _tell(self, error: Exception, dropped: int) -> None:
        """Log a failure, unless it is that of the call before."""
        code = error.errno if isinstance(error, OSError) else None
        failure = type(error), code or str(error)  # texts of errors with a code name other files each time
        if failure != self._told:
            expected = isinstance(error, OSError)
            LOG.warning("disk cache: %d entries are not kept: %s", dropped, error, exc_info=not expected)
        self._told = failure

    def _done(self, size: int) -> None:
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()

    def _drop_queued(self) -> int:
        """Forget what is queued; return how many calls."""
        with self._changed:
            self.failures += 1
            dropped = len(self._waiting)
            self._bytes -= sum(size for _, size in self._waiting)
            self._waiting.clear()
        return dropped


class DiskCache:
    """Entries in a folder, of at most `size` bytes. What is queued is written before the process ends.

    network: the folder may lie on a network's file system. Raises CacheError (see `CacheFolder`).
    """

    def __init__(self, folder: str | Path, size: int, network: bool = False) -> None:
        self.store = EntryStore(CacheFolder(Path(folder), network), size)
        self.queue = WriteQueue()
        self.close = weakref.finalize(self, _close, self.queue, self.store.folder)
        """Writes what is queued, and closes the folder; done at the latest when nobody holds this any more."""


def _close(queue: WriteQueue, folder: CacheFolder) -> None:
    if queue.close():  # else the thread still has files open there
        folder.close()


USUAL_SIZE = "20GiB"


class DiskCacheSettings(NamedTuple):
    """Place and size of a disk cache, once they are known to be right; without a folder there is none."""

    folder: Path | None = None
    size: int = 0
    network: bool = False

    @staticmethod
    def parse(folder: str | Path | None, size: str | int, network: bool, ranks: TPGroup) -> DiskCacheSettings:
        """Check a folder and its size in bytes; nothing is made. Raises RequestError, CacheError, or TypeError."""
        path = named_path("disk_cache", folder)
        bytes_ = cache_size_of(size)
        require_bool("disk_cache_network", network)
        if path is None:
            if network or bytes_ != size_of(USUAL_SIZE):
                raise RequestError(
                    f"{argument('disk_cache_size')} and {argument('disk_cache_network')} are of a disk cache; name its "
                    f"folder with {argument('disk_cache')}"
                )
            return DiskCacheSettings()
        if ranks.count > 1:
            raise RequestError(
                f"a disk cache is of one process; leave out {argument('ranks')} and torchrun, or "
                f"{argument('disk_cache')}"
            )
        require_usable(path, network)
        return DiskCacheSettings(path, bytes_, network)

    def open(self) -> DiskCache | None:
        """Return the cache, in a folder that is made where there is none. Raises CacheError."""
        return None if self.folder is None else DiskCache(self.folder, self.size, self.network)
