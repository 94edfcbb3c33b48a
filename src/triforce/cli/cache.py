"""`triforce cache`: entries of a disk cache, which other processes may use meanwhile."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from triforce.disk_cache.documents import watched_folders
from triforce.disk_cache.entry_store import EntryStore, StoredEntry
from triforce.disk_cache.folder import CacheFolder
from triforce.errors import CacheError, printable
from triforce.interface.quantities import counted

LISTED_PROMPTS = 20
"""Number of a model's prompts that are listed."""
FACTS = {"model", "profile", "kind", "after", "segment", "tokens"}
"""Facts that the header of a KV entry states."""
DAMAGED = 1
"""Exit code if entries were damaged, or could not be removed or read and remain."""

Returned = TypeVar("Returned")


def run(options: Namespace) -> int:
    """List, verify or clear a disk cache. Raises CacheError."""
    store = EntryStore(CacheFolder(Path(options.folder), network=True, create=False), sys.maxsize)
    commands: dict[str, Callable[[EntryStore], int]] = {"list": _list, "verify": _verify, "clear": _clear}
    return commands[options.cache](store)


def _locked_call(call: Callable[[], Returned]) -> Returned:
    """Return the value of a call that locks the folder. Raises CacheError if the call fails."""
    try:
        return call()
    except OSError as error:
        raise CacheError(f"{error}; try again") from error


_NUMBER = re.compile("[0-9]{1,12}")


class _KVEntry(NamedTuple):
    """An entry of KV: facts of its header, size in bytes, and place in the order of use."""

    name: str
    facts: dict[str, str]
    bytes: int
    place: int


def _list(store: EntryStore) -> int:
    model_entries: dict[tuple[str, str], list[_KVEntry]] = defaultdict(list)
    token_entry_count = 0
    for stored_entry in _locked_call(store.entries):
        if kv_entry := _kv_entry(store, stored_entry):
            model_entries[kv_entry.facts["model"], kv_entry.facts["profile"]].append(kv_entry)
        else:
            token_entry_count += 1
    for (model, profile), entries in sorted(model_entries.items()):
        segments = [entry for entry in entries if entry.facts["kind"] == "kv"]
        continued_names = {entry.facts["after"] for entry in segments}
        prompt_ends = sorted(
            (entry for entry in segments if entry.name not in continued_names), key=lambda entry: -entry.place
        )
        counts = f"{counted(len(prompt_ends), 'prompt')}, {counted(len(segments), 'segment')}"
        print(f"{printable(model)} ({printable(profile)}): {counts}, {_mib(sum(entry.bytes for entry in entries))}")
        for entry in prompt_ends[:LISTED_PROMPTS]:
            tokens = (int(entry.facts["segment"]) + 1) * int(entry.facts["tokens"])
            print(f"  {printable(entry.name[:8])} {tokens:>10,} tokens")
        if len(prompt_ends) > LISTED_PROMPTS:
            print(f"  and {len(prompt_ends) - LISTED_PROMPTS:,} more, less recently used")
    for folder in watched_folders(store.folder):
        print(f"{printable(folder.path)} was read by triforce watch: {counted(len(folder.files), 'file')}")
    if token_entry_count:
        print(f"and {_entries(token_entry_count)} of token ids, which tell why a prompt is read again")
    if not model_entries and not token_entry_count:
        print(f"nothing is kept in {printable(store.folder.path)}")
    return 0


def _verify(store: EntryStore) -> int:
    checked_count = damaged_count = remaining_count = 0
    for entry in _locked_call(store.entries):
        checked_count += 1
        try:
            fault = store.fault(entry.name)
            if fault:
                store.folder.remove(entry.name)
        except (OSError, MemoryError) as error:
            remaining_count += 1
            reason = getattr(error, "strerror", "") or "there is not enough memory"
            print(f"{printable(entry.name)} cannot be read or removed ({reason}) and is left", file=sys.stderr)
            continue
        if fault:
            damaged_count += 1
            print(f"{printable(entry.name)} was damaged ({fault}) and is removed", file=sys.stderr)
    damage = f"{damaged_count:,} of them {'was' if damaged_count == 1 else 'were'} damaged"
    print(
        f"{_entries(checked_count)} {'was' if checked_count == 1 else 'were'} checked, "
        f"{damage}{_remaining_note(remaining_count)}"
    )
    return DAMAGED if damaged_count or remaining_count else 0


def _clear(store: EntryStore) -> int:
    entries, size, remaining_names = _locked_call(store.clear)
    for name in remaining_names:
        print(f"{printable(name)} cannot be removed and is left", file=sys.stderr)
    print(f"removed {_entries(entries)}, {_mib(size)}{_remaining_note(len(remaining_names))}")
    return DAMAGED if remaining_names else 0


def _kv_entry(store: EntryStore, entry: StoredEntry) -> _KVEntry | None:
    """Return an entry with the facts of its header; None for an entry without KV."""
    facts = store.facts(entry.name)
    if facts and facts.keys() >= FACTS and all(_NUMBER.fullmatch(facts[name]) for name in ("segment", "tokens")):
        return _KVEntry(entry.name, facts, entry.bytes, entry.place)
    return None


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")


def _remaining_note(count: int) -> str:
    """Return the number of remaining entries as the end of a line; empty for 0."""
    return f"; {count:,} {'is' if count == 1 else 'are'} left" if count else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
