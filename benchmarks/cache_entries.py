"""A disk cache of many entries: how long it takes to open, to look for one, to count all, and to make room.

    python -m benchmarks.cache_entries --entries 100000

Entries are small, and made without being synced. Exit code 1 where opening takes a second or more, or a lookup a
millisecond or more (the slowest of a hundred, as 99 in 100 are faster).
"""

from __future__ import annotations

import os
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks import study
from triforce.cli.options import described, json_file
from triforce.disk_cache.entry import Entry, Part, packed
from triforce.disk_cache.entry_store import EntryStore, Use, place_of
from triforce.disk_cache.folder import CacheFolder

OPEN_SECONDS, LOOKUP_SECONDS = 1.0, 1e-3
"""Bounds of the verdict."""
OF_A_TEXT = 100
"""Entries of one text."""
LOOKUPS = 2000
SEGMENT_BYTES = 256 * 8
"""Bytes of the tokens that a name is made of."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--entries", type=int, default=100_000, metavar="N", help=described("entries of the folder"))
    json_file(parser)


def measure(options: Namespace) -> int:
    """Print seconds of each; return 1 where a bound does not hold."""
    with TemporaryDirectory() as folder:
        path, draw = Path(folder) / "cache", random.Random(0)
        tokens = fill(path, options.entries)
        opening, store = timed(lambda: EntryStore(CacheFolder(path), sys.maxsize))
        segments = [draw.choice(tokens) for _ in range(LOOKUPS // 2)]
        segments += [draw.randbytes(SEGMENT_BYTES) for _ in range(LOOKUPS // 2)]  # segments without an entry
        lookups = [timed(partial(looked_up, store, segment)) for segment in segments]
        if sum(entry is not None for _, entry in lookups) != LOOKUPS // 2:
            raise AssertionError("an entry was not found, or one that is not there")
        seconds = sorted(second for second, _ in lookups)
        scan, _ = timed(lambda: store.write(store.name(b"new"), entry_of(b""), Use(), 0))
        list_seconds, entries = timed(store.entries)
        store.limit = sum(entry.bytes for entry in entries) // 2
        eviction, _ = timed(lambda: store.write(store.name(b"newer"), entry_of(b""), Use(), 0))
        store.folder.close()
    row: dict[str, Any] = {
        "entries": options.entries, "open": opening,
        "lookup": seconds[LOOKUPS // 2], "slow_lookup": seconds[-LOOKUPS // 100],
        "first_write_with_scan": scan, "list": list_seconds, "eviction_of_half": eviction,
    }  # fmt: skip
    row["held"] = opening < OPEN_SECONDS and row["slow_lookup"] < LOOKUP_SECONDS
    print(row)
    study.write(options, {"rows": [row]})
    return 0 if row["held"] else 1


def fill(path: Path, count: int) -> list[bytes]:
    """Make a folder with `count` entries. Returns the token bytes of their segments."""
    folder = CacheFolder(path)
    draw = random.Random(1)
    store = EntryStore(folder, sys.maxsize)
    tokens = [draw.randbytes(SEGMENT_BYTES) for _ in range(count)]
    for index, segment in enumerate(tokens):
        name = name_of(store, segment)
        data = b"".join(packed(entry_of(segment, name)))
        descriptor = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, data)
        os.close(descriptor)
        folder.mark(name, place_of(index // OF_A_TEXT + 1, index % OF_A_TEXT, reused=False))
    folder.close()
    return tokens


def entry_of(data: bytes, name: str = "") -> Entry:
    return Entry({"kind": "kv", "name": name}, {"keys": Part("U8", [len(data)], memoryview(data))})


def looked_up(store: EntryStore, segment: bytes) -> Entry | None:
    return store.read(name_of(store, segment))


def name_of(store: EntryStore, segment: bytes) -> str:
    return store.name(b"kv", b"after", segment)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and what it returned."""
    started = perf_counter()
    value = call()
    return perf_counter() - started, value


main = study.command("cache_entries", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
