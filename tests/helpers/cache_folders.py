"""Disk caches with entries of random bytes, and processes that write to them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from triforce.disk_cache.entry import Entry, Part
from triforce.disk_cache.entry_store import EntryStore, Use
from triforce.disk_cache.folder import CacheFolder

LIMIT = 1 << 20


def store_in(path: Path, limit: int = LIMIT) -> EntryStore:
    return EntryStore(CacheFolder(path), limit)


def made_entry(seed: int = 0, size: int = 1000) -> Entry:
    data = memoryview(bytearray(random.Random(seed).randbytes(size)))
    return Entry({"kind": "kv", "segment": str(seed)}, {"keys": Part("U8", [size], data)})


def write(store: EntryStore, text: int, entries: int, size: int = 1000) -> list[str]:
    """Write a text of `count` entries; return their names."""
    use, names = Use(), [store.name(b"%d" % text, b"%d" % index) for index in range(entries)]
    for index, name in enumerate(names):
        store.write(name, made_entry(text * 1000 + index, size), use, index)
    return names


def present(store: EntryStore, names: list[str]) -> list[bool]:
    return [store.folder.has(name) for name in names]


WRITER = """
import sys
from pathlib import Path
from tests.helpers.cache_folders import store_in, write
store = store_in(Path(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
for text in range(int(sys.argv[3]), int(sys.argv[4])):
    write(store, text, 4, 20_000)
"""


def writer(path: Path, limit: int, texts: range) -> subprocess.Popen[bytes]:
    """Yield a process that has begun to write texts of four entries each."""
    arguments = [str(path), str(limit), str(texts.start), str(texts.stop)]
    process = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    return process
