"""Faulty cache folders: damaged, forged, replaced, too large. Cases list, verify and clear them, and use them as a
server does, whose answers go on in any case.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from tests.helpers.cache_folders import made_entry, store_in, write
from tests.helpers.fuzz_kinds.config_json import commanded
from triforce.disk_cache import documents
from triforce.disk_cache.documents import WatchedFolder
from triforce.disk_cache.folder import sealed
from triforce.disk_cache.folder_checks import SUFFIX
from triforce.disk_cache.write_queue import DiskCache
from triforce.errors import CacheError

COMMANDS = ("list", "verify", "clear", "use", "use", "use")
SIZES = [0, 1, 7, 8, 9, 40, 41, 4096, 1 << 20, 1 << 30, 8 << 30, 1 << 40]
NUMBERS: list[Any] = [0, 1, -1, 31, 33, 1 << 31, 1 << 63, 1 << 64, 10**30, 1.5, float("nan"), True, None, "1", [], {}]
WORDS = [
    "",
    "\0",
    "\x1b[31m",
    "a\nb",
    "\ud800",
    "x" * 10_000,
    "\u0665",
    "9" * 5000,
    "../secret",
    "/dev/zero",
    "nan",
    "-1",
]
TIMES = [0, 1, 1 << 31, 1 << 33, (1 << 34) - 1, 253_402_300_799]

Change = Callable[[Random, Path], None]
"""Changes a file, or puts something else in its place."""


def write_cache(random: Random, folder: Path) -> Path:
    """Write a cache with entries of two texts and of a folder that is watched."""
    cache = folder / "cache"
    store = store_in(cache)
    for text in range(2):
        write(store, text, random.randrange(1, 3), random.choice((1, 100, 5000)))
    documents.record_folder(store.folder, WatchedFolder(folder, random.random() < 0.5, [("a.txt", "0" * 32)]))
    store.folder.close()
    return cache


def write_whole(asked: str, folder: Path) -> None:
    write_cache(Random(0), folder)
    (folder / "asked").write_text(asked)


WHOLES = [partial(write_whole, asked) for asked in COMMANDS[:4]]


def make_case(random: Random, folder: Path) -> None:
    cache = write_cache(random, folder)
    for _ in range(random.choice((1, 1, 2, 5))):
        random.choice(CHANGES)(random, cache / random.choice(sorted(os.listdir(cache))))
    (folder / "asked").write_text(random.choice(COMMANDS))


def open_case(folder: Path) -> int:
    cache = folder / "cache"
    asked = (folder / "asked").read_text()
    if asked == "use":
        return used(cache)
    code = commanded(["cache", asked, str(cache)])
    if asked != "list" and code == 1:  # printed line by line
        assert commanded(["cache", asked, str(cache)]) in (0, 1)
        return 0
    return code


def used(cache: Path) -> int:
    """Read entries, write more, and read those, as a server does without making answers wait."""
    try:
        disk = DiskCache(cache, 1 << 20)
    except CacheError as error:
        print(f"triforce: error: {error}", file=sys.stderr)
        return 2
    store = disk.store
    names = [store.name(b"%d" % text, b"%d" % index) for text in range(2) for index in range(2)]
    first_read = list(store.read_ahead(names))
    again = list(store.read_ahead(names))
    assert [entry is None for entry in first_read] == [entry is None for entry in again]
    documents.watched_folders(store.folder), list(documents.documents(store.folder))
    for text in range(2, 4):
        disk.queue.offer(lambda text=text: write(store, text, 2) and None, 1)  # type: ignore[misc]
        assert disk.queue.flush()
    rewritten = store.read(store.name(b"3", b"1"))
    assert rewritten is None or rewritten.parts["keys"].data == made_entry(3001).parts["keys"].data
    assert disk.close() is None
    return 0


def resize(random: Random, file: Path) -> None:
    os.truncate(file, random.choice([*SIZES, file.stat().st_size + random.choice((-1, 1, 32))]) % (1 << 41))


def flip(random: Random, file: Path) -> None:
    data = bytearray(file.read_bytes() or b"\0")
    for _ in range(random.choice((1, 3))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def replace(random: Random, file: Path) -> None:
    """Replace a file by a folder, a pipe, a link, another file's content, or an unreadable file."""
    if (kind := random.randrange(6)) < 4:
        file.unlink()
    match kind:
        case 0:
            (file / "inner").mkdir(parents=True)
        case 1:
            os.mkfifo(file, 0o600)
        case 2:
            file.symlink_to(random.choice(["/dev/zero", file.name, "nowhere", "secret", "/proc/self/mem"]))
        case 3:
            file.mkdir()
        case 4:
            sibling_files = [sibling for sibling in sorted(file.parent.iterdir()) if plain(sibling)]
            file.write_bytes(random.choice(sibling_files).read_bytes())
        case 5:
            file.chmod(random.choice((0, 0o644, 0o400)))


def lose(random: Random, file: Path) -> None:
    file.unlink()


def add(random: Random, file: Path) -> None:
    """Add a file of another name, which may match an entry's."""
    name = random.choice([file.stem, "letter", "\x1b[31m", "a\nb", "\udcff", "f" * 40, f"{'0' * 40}.kv.{'1' * 16}"])
    sibling = file.with_name(name + random.choice([SUFFIX, ".partial", ""]))
    if not os.path.lexists(sibling):
        sibling.write_bytes(b"x" * random.choice((0, 100)))
        sibling.chmod(0o600)


def forge_header(random: Random, file: Path) -> None:
    """Change a word or number in the header of an entry, and make its checksum valid."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return flip(random, file)
    for _ in range(random.choice((1, 1, 3))):
        change_value(random, header)
    text = json.dumps(header).encode()
    forged = random.choice((len(text), len(text), 1, 1 << 20, 1 << 63, (1 << 64) - 1)).to_bytes(8, "little") + text
    body = forged + data[8 + length : -32]
    file.write_bytes(body + blake2b(body, digest_size=32).digest())


def change_value(random: Random, tree: Any) -> None:
    """Change, remove or add a value anywhere in a JSON value."""
    while isinstance(tree, dict | list) and tree:
        key = random.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if not isinstance(tree[key], dict | list) or not tree[key] or random.random() < 0.2:
            break
        tree = tree[key]
    else:
        return
    if random.random() < 0.2:
        del tree[key]
    else:
        tree[key] = random.choice([*NUMBERS, *WORDS])
    if isinstance(tree, dict) and random.random() < 0.2:
        tree[random.choice(WORDS)] = random.choice([*NUMBERS, *WORDS])


def forge_manifest(random: Random, file: Path) -> None:
    manifest: Any = [{"path": random.choice(WORDS), "each": True, "files": [[random.choice(WORDS), "0"], ["b", "1"]]}]
    change_value(random, manifest)
    text = random.choice([json.dumps(manifest), "[" * 100_000, "9" * 5000, json.dumps(manifest)[:-1], "null", "{}"])
    put(file.with_name("manifest"), text.encode())


def forge_state(random: Random, file: Path) -> None:
    numbers = [random.choice((0, 1, 1 << 33, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)) for _ in range(2)]
    put(file.with_name("state"), sealed(struct.pack("<QQ", *numbers)))


def put(file: Path, data: bytes) -> None:
    """Write a file, replacing anything but a folder."""
    if not file.is_dir() or file.is_symlink():
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        file.chmod(0o600)


def age(random: Random, file: Path) -> None:
    second = random.choice(TIMES)
    os.utime(file, ns=(0, second * 10**9 + random.randrange(10**9)))


def on_files(*changes: Change) -> Iterable[Change]:
    """Apply a change to plain files only."""
    for change in changes:
        yield lambda random, file, change=change: change(random, file) if plain(file) else None  # type: ignore[misc]


def plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 22


CHANGES = list(
    on_files(resize, resize, flip, replace, lose, add, forge_header, forge_header, forge_state, forge_manifest, age)
)
