"""Faults of the disk cache: names that say too little, files that are believed, room that is not kept."""

from __future__ import annotations

from typing import Any

from tests.helpers.mutants.mutation import Edit, Mutant, Swap

PREFIXES = "triforce.disk_cache.prefixes:DiskPrefixes"
TEXT = "triforce.disk_cache.prefixes:DiskText"
COPY = "triforce.disk_cache.prefixes:_copy"
STORE = "triforce.disk_cache.entry_store:EntryStore"
FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "names without a scope": ("scopes", f"{PREFIXES}.root", (", scope.encode())", ")")),
    "latest texts of all scopes together": (
        "scopes", f"{PREFIXES}._latest_name", ("self.root(scope)", 'self.root("")'),
    ),
    "names without kernels": ("kernels", f"{PREFIXES}.root", ("self._profile.kernels, ", "")),
    "reading that never ends": ("slowness", f"{TEXT}.restore", ("while not self.given_up:", "while True:")),
    "entries are written under their names": (
        "kills", f"{STORE}.write", ('f"{name}.{secrets.token_hex(8)}{PARTIAL}"', "name"),
    ),
    "names by a segment alone": ("chains", f"{TEXT}._segment_names", ("previous_name.encode(), ids", "ids")),
    "segments one place late": (
        "texts", COPY, ("write_layers(pool.kv, slots_N,", "write_layers(pool.kv, pool.xp.roll(slots_N, 1),"),
    ),
    "keys and values exchanged": (
        "texts", COPY, ("zip(full_layers, layers, strict=True)", "zip(full_layers, [pair[::-1] for pair in layers])"),
    ),
    "the last tokens come from disk, too": ("texts", f"{TEXT}.restore", ("len(prompt) - 1 - TAIL", "len(prompt) - 1")),
    "pages behind a segment that are another text's": (
        "forks", f"{TEXT}._restore_tail", ("common_prefix(ids.tolist(), ", "(len"),
    ),
    "pages behind a segment that are not whole": (
        "forks", f"{TEXT}._restore_tail", ("SEGMENT])) // PAGE * PAGE", "SEGMENT])) // PAGE * PAGE + 1"),
    ),
    "checksums that nobody looks at": (
        "damage", "triforce.disk_cache.entry:_require_whole", ("!= content[-DIGEST_BYTES:]", "== b''"),
    ),
    "requests kept out are kept": (
        "kept_out", "triforce.llm:LLM.request", ("stop_ids, scope,", "stop_ids, scope or '',"),
    ),
    "no room is made": ("size", f"{STORE}._make_room", ("self._drop(evicted)", "pass")),
    "entries that are being written do not count": (
        "together", f"{STORE}._scan", ("partial_bytes += facts.st_size", "pass"),
    ),
    "files of living writers are removed": (
        "writers", f"{STORE}._remove_abandoned", ("fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ),
    "links are followed": (
        "refusals", "triforce.disk_cache.folder:CacheFolder.open", ("flags | _FILE", "flags | os.O_CLOEXEC"),
    ),
}  # fmt: skip


def reversed_places(place_of: Any) -> Any:
    return lambda order, index, reused: place_of(order, 1000 - index, reused)


MUTANTS = [
    Mutant(
        name, "tests/llm/test_disk_cache_laws.py::test_disk_cache_mutant_is_noticed", (Edit(target, change),), (check,)
    )
    for name, (check, target, change) in FAULTS.items()
] + [
    Mutant(
        "beginnings are given up before ends",
        "tests/llm/test_disk_cache_laws.py::test_disk_cache_mutant_is_noticed",
        (Swap("triforce.disk_cache.entry_store:place_of", reversed_places),),
        ("size",),
    )
]
