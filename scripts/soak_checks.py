"""Checks of a soak: gaps between tokens of a stream, an idle server at the end, and the contents of its disk cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.folder import CacheFolder

PARTS = 6
"""Parts of the run. Entries must be evicted in each part after the first."""


class Gaps:
    """The longest time between two tokens of a stream: while the server reads a long prompt, and otherwise.

    gaps: start and end of each gap. readings: start and end of each request with a long prompt.
    """

    def __init__(self, gaps: Sequence[Sequence[float]], readings: Sequence[tuple[float, float]]) -> None:
        self.while_reading = self.otherwise = 0.0
        for gap_start, gap_end in gaps:
            if any(start <= gap_end and gap_start <= end for start, end in readings):
                self.while_reading = max(self.while_reading, gap_end - gap_start)
            else:
                self.otherwise = max(self.otherwise, gap_end - gap_start)


class KeptEntries:
    """Size and evictions of the server's disk cache while it is in use."""

    def __init__(self, folder: Path, size: int) -> None:
        """Open the cache in `folder`. size: bytes that it may hold."""
        self._store = EntryStore(CacheFolder(folder), size)
        self._names = set[str]()
        self._size = size
        self.largest_size = 0
        """Largest size of the cache in bytes, over all samples."""
        self.evicted = [0] * PARTS
        """Count of entries that were evicted in each part of the run."""

    def sample(self, share: float) -> None:
        """Take a sample of the entries. share: the share of the run that is over."""
        entries = self._store.entries()
        names = {entry.name for entry in entries}
        self.largest_size = max(self.largest_size, sum(entry.bytes for entry in entries))
        self.evicted[min(int(share * PARTS), PARTS - 1)] += len(self._names - names)
        self._names = names

    @property
    def within_limits(self) -> bool:
        """True if the cache stayed within its size, and evicted entries in each part of the run after the first."""
        return self.largest_size <= self._size and all(self.evicted[1:])


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Return whether `holds` becomes true within `seconds`."""
    until = time.monotonic() + seconds
    while not (condition_holds := holds()) and time.monotonic() < until:
        time.sleep(0.5)
    return condition_holds


def idle(url: str) -> bool:
    """Return whether no request runs or waits and no KV is held."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    busy = [line for line in lines if line.startswith(("vllm:num_requests_", "triforce:kv_tokens{"))]
    return bool(busy) and all(line.endswith(" 0.0") for line in busy)
