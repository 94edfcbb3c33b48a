"""Laws of the disk cache as functions, for the tests that hold them and for the mutants that break them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.helpers.cache_folders import present, store_in, write
from tests.helpers.disk_llm import HOW, PROMPT, SEGMENTS, WHOLE, answer, check_restored, started
from tests.helpers.engine_scene import check_same
from tests.helpers.tiny_llm import ask, ids, llm
from triforce.backends import dispatch
from triforce.disk_cache import prefixes
from triforce.disk_cache.entry import Entry
from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.folder import CacheFolder
from triforce.disk_cache.folder_checks import PARTIAL
from triforce.disk_cache.prefixes import SEGMENT
from triforce.errors import CacheError
from triforce.kvcache import PAGE


def texts(folder: Path, cache: Path) -> None:
    """Texts restored from disk equal texts of a fresh prefill, draft tokens included."""
    check_restored(folder, cache, "triforce", "rejection")


@contextmanager
def spied_reads() -> Iterator[list[bool]]:
    """Record for each lookup of an entry whether it was a hit."""
    hits: list[bool] = []
    read = EntryStore.read

    def spy(store: EntryStore, name: str) -> Entry | None:
        entry = read(store, name)
        hits.append(entry is not None)
        return entry

    with patch.object(EntryStore, "read", spy):
        yield hits


def seen_by(folder: Path, cache: Path, scope: str | None) -> tuple[list[int], int, str, list[bool]]:
    """Return all that a client of a scope can observe of a prompt: text, usage, label, and hits of lookups."""
    with spied_reads() as hits:
        output = answer(started(folder, cache), PROMPT, scope=scope)
    return output.outputs[0].token_ids, output.cached_tokens, output.exactness, hits


def scopes(folder: Path, cache: Path) -> None:
    """One API key cannot learn whether another has read a document."""
    nobody_had = seen_by(folder, cache.with_name("empty"), "b")
    answer(started(folder, cache), PROMPT, scope="a")
    assert seen_by(folder, cache, "b") == nobody_had
    text, cached, *_ = seen_by(folder, cache, "b")
    assert (text, cached) == (nobody_had[0], WHOLE), "its own it finds"


def chains(folder: Path, cache: Path) -> None:
    """A segment is found behind the tokens before it, and behind no others."""
    branch = [*ids(SEGMENT, seed=9), *PROMPT[SEGMENT:]]
    answer(started(folder, cache), PROMPT, "ar")
    first_output = answer(started(folder, cache), branch, "ar")
    answer(started(folder, cache), branch, "ar")
    again = answer(started(folder, cache), branch, "ar")
    assert (first_output.cached_tokens, again.cached_tokens) == (0, WHOLE)
    expected_ids = answer(llm(folder), branch, "ar").outputs[0].token_ids
    assert first_output.outputs[0].token_ids == again.outputs[0].token_ids == expected_ids


def forks(folder: Path, cache: Path) -> None:
    """A text that differs within a segment reuses the whole pages before the difference, and no more."""
    for common in (SEGMENTS + 40, SEGMENTS + 5):
        branch = [*PROMPT[:common], *ids(60, seed=9)]
        answer(started(folder, cache), PROMPT)
        first_output = answer(started(folder, cache), branch)
        assert first_output.cached_tokens == common // PAGE * PAGE
        check_same(first_output.outputs, answer(llm(folder, **HOW), branch).outputs)


def damage(folder: Path, cache: Path) -> None:
    """An entry with a bit flipped anywhere is not used."""
    answer(started(folder, cache), PROMPT, "ar")
    for file in cache.glob("*.kv"):
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 2, len(data) // 2 + 600):
            data[at] ^= 64
        file.write_bytes(data)
    output = answer(started(folder, cache), PROMPT, "ar")
    assert output.outputs[0].token_ids == answer(llm(folder), PROMPT, "ar").outputs[0].token_ids
    assert output.cached_tokens == 0


def kept_out(folder: Path, cache: Path) -> None:
    """A request without a scope leaves no entry on disk or in memory, and finds none."""
    answer(started(folder, cache), PROMPT, scope=None)
    assert not list(cache.glob("*.kv"))
    model = started(folder, cache)
    engine = model.open(4, 1500)
    for scope in (None, "", None):
        request = model.request(PROMPT, ask(max_tokens=1), "ar", scope)
        engine.submit([request])
        assert engine.finish(request).cached_tokens == 0
    engine.close()


def kernels(folder: Path, cache: Path) -> None:
    """KV of another build of the kernels is not used: its bits may differ."""
    answer(started(folder, cache), PROMPT, "ar")
    with patch.object(dispatch, "build_identity", lambda: "another build"):
        assert answer(started(folder, cache), PROMPT, "ar").cached_tokens == 0
    assert answer(started(folder, cache), PROMPT, "ar").cached_tokens == WHOLE


def slowness(folder: Path, cache: Path) -> None:
    """A read slower than the recorded prefill is abandoned, and the text is the same."""
    answer(started(folder, cache), PROMPT, "ar")
    ticks = count()
    with patch.object(prefixes, "perf_counter", lambda: float(next(ticks))), patch.object(prefixes, "GRACE", 0.0):
        output = answer(started(folder, cache), PROMPT, "ar")
    assert output.cached_tokens == SEGMENT, "the first one told"
    assert output.reread == f"after its first {SEGMENT} tokens the disk is slower than a new prefill"
    assert output.outputs[0].token_ids == answer(llm(folder), PROMPT, "ar").outputs[0].token_ids


def kills(folder: Path, cache: Path) -> None:
    """A process that ends in the middle of a write leaves nothing under the name of an entry."""
    store = store_in(cache)
    plain = os.write

    def half(descriptor: int, data: memoryview) -> int:
        plain(descriptor, data[: len(data) // 2])
        raise KeyboardInterrupt

    with patch.object(os, "write", half), patch.object(CacheFolder, "remove"), suppress(KeyboardInterrupt):
        write(store, 1, 1)  # a killed process removes no file
    assert present(store, [store.name(b"1", b"0")]) == [False]
    assert present(store, write(store, 1, 1)) == [True]


def size(folder: Path, cache: Path) -> None:
    """The cache never exceeds its size, and has no segment without those before it."""
    store = store_in(cache, limit=20_000)
    texts = [write(store, text, 4) for text in range(12)]
    assert sum(entry.bytes for entry in store.entries()) <= 20_000
    presence = [present(store, names) for names in texts]
    assert presence[-1] == [True] * 4 and all(
        segment_presence == sorted(segment_presence, reverse=True) for segment_presence in presence
    )


def together(folder: Path, cache: Path) -> None:
    """Bytes of a pending write count when another process fills the folder meanwhile."""
    first_store = store_in(cache, 20_000)
    second_store = store_in(cache, 20_000)
    fsync = os.fsync
    nested = list[int]()
    write(first_store, 1, 1)

    def meanwhile(descriptor: int) -> None:
        if not nested:
            nested.append(1)
            write(second_store, 2, 40)
        fsync(descriptor)

    with patch.object(os, "fsync", meanwhile):
        write(first_store, 3, 1, size=9000)
    assert nested and sum(entry.bytes for entry in first_store.entries()) <= 20_000


def writers(folder: Path, cache: Path) -> None:
    """The file of a live writer is no remainder; that of a dead one is."""
    store = store_in(cache)
    clearing_store = store_in(cache)
    fsync = os.fsync
    (cache / f"left{PARTIAL}").write_bytes(b"half")
    (cache / f"left{PARTIAL}").chmod(0o600)
    cleared: list[tuple[int, int]] = []

    def meanwhile(descriptor: int) -> None:
        cleared[:] = cleared or [clearing_store.clear()]
        fsync(descriptor)

    with patch.object(os, "fsync", meanwhile):
        names = write(store, 1, 1)
    assert cleared and present(store, names) == [True]
    assert [name for name, _ in store.folder.files()] == names


def refusals(folder: Path, cache: Path) -> None:
    """Links and folders of others are refused."""
    (cache.with_name("real")).mkdir(mode=0o700)
    cache.symlink_to(cache.with_name("real"))
    with pytest.raises(CacheError):
        CacheFolder(cache)
    real = CacheFolder(cache.with_name("real"))
    (cache.with_name("elsewhere")).write_text("")
    (cache.with_name("elsewhere")).chmod(0o600)
    (cache.with_name("real") / "name").symlink_to(cache.with_name("elsewhere"))
    with pytest.raises(OSError):
        os.close(real.open("name"))


LAWS = (texts, scopes, chains, forks, kernels, damage, kept_out, slowness, kills, size, together, writers, refusals)
CHECKS: dict[str, Callable[[Path, Path], None]] = {law.__name__: law for law in LAWS}
