"""Faults of layers with a window that have pages of their own."""

from __future__ import annotations

from tests.helpers.mutants.mutation import Edit, Mutant

PAGES, PREFIXES = "triforce.kvcache.pool:WindowPages", "triforce.kvcache.prefix_cache:PrefixCache"
TABLES = "tests/kvcache/test_window_pages.py::test_window_pages_mutant_is_noticed"
FOUND = "tests/kvcache/test_prefix_cache.py::test_prefix_windows_mutant_is_noticed"
SESSION = "tests/engine/test_kept_windows.py::test_narrow_windows_session_mutant_is_noticed"
OFFLOADED = "tests/kvcache/offload/test_offload_families.py::test_offload_family_mutant_is_noticed"
STORED = "triforce.backends.cpu.offload:NativeOffloadedKV"
DISK = "tests/llm/test_disk_cache_windows.py::test_windows_on_disk_mutant_is_noticed"
WINDOWS = "triforce.disk_cache.prefixes:DiskWindows"
TEXTS = "tests/engine/test_narrow_windows.py::test_narrow_windows_mutant_is_noticed"
FAULTS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "a window one page too short": (TABLES, f"{PAGES}.first_needed_page", ("window + 1)", "window + 1 + PAGE)")),
    "a page given back one token too early": (TABLES, f"{PAGES}.first_needed_page", ("window + 1)", "window + 2)")),
    "a page given back for tokens that may be refused": (
        TABLES, "triforce.kvcache.pool:PagePool.prepare_pass", ("int(self.lengths_B[b]), stop", "stop, stop"),
    ),
    "layers with a window write to the pages of the others": (
        TABLES, "triforce.kvcache.views.full:table_by_window", ("windows=True", "windows=False"),
    ),
    "what is behind a window is never given back": (
        TABLES, f"{PAGES}.prepare_pass", ("max(self.first_pages[b], self.first_kept_page(committed))", "0"),
    ),
    "a prefix is found a page before its window": (
        FOUND, f"{PREFIXES}._with_windows", ("<= windows.first_needed_page(", "<= 1 + windows.first_needed_page("),
    ),
    "pages that a row reads leave the prefix cache": (
        FOUND, "triforce.kvcache.pool:WindowAllocator.evict", ("self.refcounts[page] == 1", "True"),
    ),
    "pages of a prefix have no second owner": (FOUND, f"{PAGES}.attach_prefix", ("self.allocator.incref(", "len(")),
    "a swapped row comes back a page short": (
        TEXTS, f"{PAGES}.allocate_row",
        ("max(pages_for(start), self.first_kept_page(stop))", "3 + self.first_kept_page(stop)"),
    ),
    "a session goes back behind its windows": (
        SESSION, "triforce.kvcache.views.full:FullView.rewind_length", ("windows is None or", "True or"),
    ),
    "offloaded layers have no sink logits": (
        OFFLOADED, f"{STORED}._offload", ("sink_logits=None if logits_LH is None else ", "sink_logits=None and "),
    ),
    "offloaded layers have the sink logits of the first ones": (
        OFFLOADED, f"{STORED}._offload", ("logits_LH[layers]", "logits_LH[: len(layers)]"),
    ),
    "offloaded scores have no cap": (OFFLOADED, f"{STORED}._offload", ("config.architecture.score_cap", "0.0")),
    "windows of the segment before": (
        DISK, f"{WINDOWS}.restore", ("self._segment(names[index], index)", "self._segment(names[index - 1], index)"),
    ),
    "windows from disk one token late": (
        DISK, f"{WINDOWS}.restore",
        ("windows.slots(row, tokens.start, tokens.stop)", "np.roll(windows.slots(row, tokens.start, tokens.stop), 1)"),
    ),
    "windows from disk a page short": (
        DISK, f"{WINDOWS}.restore", ("first_needed_page(stop) * PAGE", "first_needed_page(stop) * PAGE + PAGE"),
    ),
    "a mark is taken of pages that were written anew": (
        SESSION, "triforce.kvcache.pool:WindowSnapshot.restore", ("min(self._length, length)", "self._length"),
    ),
    "a mark is never taken": (
        SESSION, "triforce.kvcache.pool:WindowSnapshot.take", ("windows := self._pool.windows", "windows := None"),
    ),
    "a row leaves and keeps its promise": (TEXTS, f"{PAGES}.release", ("-= self._reserved[b]", "-= 0")),
    "rows of windows by place": (
        TEXTS, f"{PAGES}.select", ("[self.tables[b] for b in rows]", "self.tables[: len(rows)]"),
    ),
}  # fmt: skip
MUTANTS = [Mutant(name, test, (Edit(target, change),)) for name, (test, target, change) in FAULTS.items()]
MUTANTS.append(
    Mutant(
        "windows that were given back are kept on disk",
        DISK,
        (
            Edit("triforce.disk_cache.prefixes:DiskPrefixes._parts", ("or not all(pages.window_pages)", "")),
            Edit(f"{WINDOWS}.keep", ("self._windows.first_kept_page(tokens)", "0")),
        ),
    )
)
