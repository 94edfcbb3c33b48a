"""DiskCache: an open folder of entries, and the thread that writes to it."""

from __future__ import annotations

import weakref
from pathlib import Path

from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.write_queue import WriteQueue


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
