"""`triforce cache`: entries of a disk cache, beside whoever uses it."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from triforce.cli.counts import counted
from triforce.disk_cache.documents import watched_folders
from triforce.disk_cache.entry_store import EntryStore, StoredEntry
from triforce.disk_cache.folder import CacheFolder
from triforce.errors import CacheError, printable

SHOWN = 20
"""Prompts of a model that are listed."""
FACTS = {"model", "profile", "kind", "after", "segment", "tokens"}
"""Facts that the header of an entry says."""
DAMAGED = 1
"""The exit code where entries were damaged, or something is left that could not be removed or read."""

Reached = TypeVar("Reached")


def run(options: Namespace) -> int:
    """List, verify or clear a disk cache. Raises CacheError."""
    store = EntryStore(CacheFolder(Path(options.folder), network=True, create=False), sys.maxsize)
    commands: dict[str, Callable[[EntryStore], int]] = {"list": _list, "verify": _verify, "clear": _clear}
    return commands[options.cache](store)


def _reached(call: Callable[[], Reached]) -> Reached:
    """Return what a call that locks the folder returns. Raises CacheError where it cannot."""
    try:
        return call()
    except OSError as error:
        raise CacheError(f"{error}; try again") from error


_NUMBER = re.compile("[0-9]{1,12}")


class _Kept(NamedTuple):
    """An entry: what its header says, its bytes and its place in the order of use."""

    name: str
    facts: dict[str, str]
    bytes: int
    place: int


def _list(store: EntryStore) -> int:
    models: dict[tuple[str, str], list[_Kept]] = defaultdict(list)
    others = 0
    for held in _reached(store.entries):
        if kept := _kept(store, held):
            models[kept.facts["model"], kept.facts["profile"]].append(kept)
        else:
            others += 1
    for (model, profile), entries in sorted(models.items()):
        segments = [entry for entry in entries if entry.facts["kind"] == "kv"]
        followed = {entry.facts["after"] for entry in segments}
        ends = sorted((entry for entry in segments if entry.name not in followed), key=lambda entry: -entry.place)
        counts = f"{counted(len(ends), 'prompt')}, {counted(len(segments), 'segment')}"
        print(f"{printable(model)} ({printable(profile)}): {counts}, {_mib(sum(entry.bytes for entry in entries))}")
        for entry in ends[:SHOWN]:
            tokens = (int(entry.facts["segment"]) + 1) * int(entry.facts["tokens"])
            print(f"  {printable(entry.name[:8])} {tokens:>10,} tokens")
        if len(ends) > SHOWN:
            print(f"  and {len(ends) - SHOWN:,} that were used before these")
    for folder in watched_folders(store.folder):
        print(f"{printable(folder.path)} was read by triforce watch: {counted(len(folder.files), 'file')}")
    if others:
        print(f"and {_entries(others)} of token ids, to tell why a prompt is read again")
    if not models and not others:
        print(f"nothing is kept in {printable(store.folder.path)}")
    return 0


def _verify(store: EntryStore) -> int:
    checked = damaged = left = 0
    for entry in _reached(store.entries):
        checked += 1
        try:
            fault = store.fault(entry.name)
            if fault:
                store.folder.remove(entry.name)
        except (OSError, MemoryError) as error:
            left += 1
            why = getattr(error, "strerror", "") or "there is not enough memory"
            print(f"{printable(entry.name)} cannot be read or removed ({why}) and is left", file=sys.stderr)
            continue
        if fault:
            damaged += 1
            print(f"{printable(entry.name)} was damaged ({fault}) and is removed", file=sys.stderr)
    damage = f"{damaged:,} of them {'was' if damaged == 1 else 'were'} damaged"
    print(f"{_entries(checked)} {'was' if checked == 1 else 'were'} checked, {damage}{_left(left)}")
    return DAMAGED if damaged or left else 0


def _clear(store: EntryStore) -> int:
    entries, size, left = _reached(store.clear)
    for name in left:
        print(f"{printable(name)} cannot be removed and is left", file=sys.stderr)
    print(f"removed {_entries(entries)}, {_mib(size)}{_left(len(left))}")
    return DAMAGED if left else 0


def _kept(store: EntryStore, entry: StoredEntry) -> _Kept | None:
    """Return what an entry says of its KV; None where it has none."""
    facts = store.facts(entry.name)
    if facts and facts.keys() >= FACTS and all(_NUMBER.fullmatch(facts[name]) for name in ("segment", "tokens")):
        return _Kept(entry.name, facts, entry.bytes, entry.place)
    return None


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")


def _left(count: int) -> str:
    """Return how many entries are left, to stand at the end of a line; nothing where none is."""
    return f"; {count:,} {'is' if count == 1 else 'are'} left" if count else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
