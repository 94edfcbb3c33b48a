"""Two processes write to one folder at the same time, while a third reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.helpers.cache_folders import made_entry, present, store_in, writer
from triforce.disk_cache.folder_checks import PARTIAL

LIMIT = 400_000


def test_two_processes_keep_one_size_and_whole_entries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store = store_in(tmp_path / "cache", LIMIT)
    ranges = [range(60), range(100, 160)]
    processes = [writer(tmp_path / "cache", LIMIT, texts) for texts in ranges]
    peak_bytes = 0
    while any(process.poll() is None for process in processes):
        peak_bytes = max(peak_bytes, sum(entry.bytes for entry in store.entries()))
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0] and peak_bytes <= LIMIT
    readable_entries = 0
    for text in (text for texts in ranges for text in texts):
        for index in range(4):
            entry = store.read(store.name(b"%d" % text, b"%d" % index))
            readable_entries += entry is not None
            assert not entry or entry.parts["keys"].data == made_entry(text * 1000 + index, 20_000).parts["keys"].data
    assert readable_entries == len(store.entries()) > 0 and not caplog.records
    assert not [name for name, _ in store.folder.files() if name.endswith(PARTIAL)]
    final_texts = [texts[-1] for texts in ranges]
    assert any(all(present(store, [store.name(b"%d" % text, b"%d" % i) for i in range(4)])) for text in final_texts)
