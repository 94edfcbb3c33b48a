"""WriteQueue: asynchronous writes in a thread of its own, with bounds on the queued bytes and on the rate."""

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
from triforce.interface.quantities import cache_size_of, named_path, size_of

MAX_QUEUED_BYTES = 256 << 20
"""Queued bytes at most."""
RATE = 512 << 20
"""Bytes written in a second at most: other programs use the disk too."""
PATIENCE = 60.0
"""Seconds that a process waits for queued writes when it ends."""

Write = Callable[[], None]


class WriteQueue:
    """Runs queued calls in order. A call that fails drops all queued calls, and is logged once.

    The same failure is logged again only after a call has succeeded.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES, rate: float = RATE) -> None:
        self._max_bytes = max_bytes
        self._rate = rate
        self._waiting: deque[tuple[Write, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None
        self.failures = 0
        self._last_failure: tuple[type[Exception], int | str] | None = None  # the failure of the latest calls

    def has_room(self, size: int) -> bool:
        """Whether a call that writes `size` bytes would be queued. An empty queue takes a call of any size."""
        with self._changed:
            return self._open and (not self._bytes or self._bytes + size <= self._max_bytes)

    def offer(self, write: Write, size: int) -> bool:
        """Queue a call that writes `size` bytes. Returns whether there was room."""
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
        """Wait until a call is done, for `seconds` seconds at most. Returns whether the queue is open."""
        with self._changed:
            queued_bytes = self._bytes
            self._changed.wait_for(lambda: self._bytes < queued_bytes or not queued_bytes, seconds)
            return self._open

    def flush(self, seconds: float = PATIENCE) -> bool:
        """Wait until the queue is empty. Returns whether it became empty within `seconds` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, seconds)

    def close(self, seconds: float = PATIENCE) -> bool:
        """Flush the queue and close it for good. Returns whether it was flushed within `seconds` seconds."""
        written = self.flush(seconds)
        with self._changed:
            self._open = False
            self._changed.notify_all()
        if written and self._thread not in (None, threading.current_thread()):
            # At exit the interpreter kills threads that wait for its lock, and sometimes the process with them.
            self._thread.join()
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
                self._last_failure = None
            except Exception as error:  # answers go on after any error
                self._log_failure(error, 1 + self._drop_queued())
            self._done(size)
            with self._changed:
                pause = size / self._rate - (perf_counter() - started)
                self._changed.wait_for(lambda: not self._open, max(pause, 0))

    def _log_failure(self, error: Exception, dropped: int) -> None:
        """Log a failure, unless it is the failure of the call before."""
        code = error.errno if isinstance(error, OSError) else None
        failure = (
            type(error),
            code or str(error),
        )  # the message of an OSError names another file each time, so its code is compared
        if failure != self._last_failure:
            expected = isinstance(error, OSError)
            LOG.warning("disk cache: %d entries are not kept: %s", dropped, error, exc_info=not expected)
        self._last_failure = failure

    def _done(self, size: int) -> None:
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()

    def _drop_queued(self) -> int:
        """Drop all queued calls, and return their count."""
        with self._changed:
            self.failures += 1
            dropped = len(self._waiting)
            self._bytes -= sum(size for _, size in self._waiting)
            self._waiting.clear()
        return dropped


class DiskCache:
    """Entries in a folder, at most `size` bytes. Queued writes are done before the process ends.

    network: accept a folder on a network file system. Raises CacheError (see `CacheFolder`).
    """

    def __init__(self, folder: str | Path, size: int, network: bool = False) -> None:
        self.store = EntryStore(CacheFolder(Path(folder), network), size)
        self.queue = WriteQueue()
        self.close = weakref.finalize(self, _close, self.queue, self.store.folder)
        """Flushes the queue and closes the folder; called at the latest when this object is collected."""


def _close(queue: WriteQueue, folder: CacheFolder) -> None:
    if queue.close():  # else the thread still has files of the folder open
        folder.close()


DEFAULT_SIZE = "20GiB"


class DiskCacheSettings(NamedTuple):
    """Checked folder and size of a disk cache; without a folder there is no disk cache."""

    folder: Path | None = None
    size: int = 0
    network: bool = False

    @staticmethod
    def parse(folder: str | Path | None, size: str | int, network: bool, ranks: TPGroup) -> DiskCacheSettings:
        """Check a folder and a size, without making the folder. Raises RequestError, CacheError, or TypeError."""
        path = named_path("disk_cache", folder)
        bytes_ = cache_size_of(size)
        require_bool("disk_cache_network", network)
        if path is None:
            if network or bytes_ != size_of(DEFAULT_SIZE):
                raise RequestError(
                    f"{argument('disk_cache_size')} and {argument('disk_cache_network')} set up a disk cache; name its "
                    f"folder with {argument('disk_cache')}"
                )
            return DiskCacheSettings()
        if ranks.count > 1:
            raise RequestError(
                f"ranks that share a model have no disk cache; leave out {argument('ranks')} and torchrun, or "
                f"{argument('disk_cache')}"
            )
        require_usable(path, network)
        return DiskCacheSettings(path, bytes_, network)

    def open(self) -> DiskCache | None:
        """Return the cache, or None without a folder. It makes the folder where there is none. Raises CacheError."""
        return None if self.folder is None else DiskCache(self.folder, self.size, self.network)
