"""Shared prefixes: keyed by all tokens before them and by scope; evicted least recently used first, from the end."""

from __future__ import annotations

import pytest

from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.narrow_windows import narrow
from tests.helpers.small_decoder import small_decoder, text
from triforce.kvcache import PAGE, PagePool
from triforce.kvcache.pool import WindowPages, max_window_pages
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import TAIL

DECODER = small_decoder()


def remembered(*texts: list[int], scope: str = "") -> tuple[PagePool, PrefixCache]:
    """Return a pool and a prefix cache that holds the texts. Their rows are released."""
    pool = PagePool(DECODER.config, 1, 12, DECODER.dtype, DECODER.device)
    prefixes = PrefixCache(pool)
    for ids in texts:
        pool.attach_prefix(0, prefixes.find(scope, ids + text(1 + TAIL)).prefix)
        pool.reserve(0, len(ids))
        prefixes.insert(scope, ids, pool.tables[0])
        pool.release(0)
    return pool, prefixes


def found(prefixes: PrefixCache, scope: str, prompt: list[int]) -> list[int]:
    return list(prefixes.find(scope, prompt).prefix.pages)


@pytest.mark.parametrize("length", [1, PAGE, TAIL, PAGE + TAIL, PAGE + TAIL + 1, 100])
def test_prefix_match_leaves_last_tokens_uncached(length: int) -> None:
    ids = text(100)
    _, prefixes = remembered(ids)
    assert len(prefixes.pages) == 6
    assert len(found(prefixes, "", ids[:length])) == max(0, length - 1 - TAIL) // PAGE


def test_prefix_is_keyed_by_tokens_and_scope() -> None:
    ids = text(100)
    _, prefixes = remembered(ids, scope="a")
    assert not found(prefixes, "b", ids)
    for changed in (0, 15, 16, 50):
        changed_ids = [*ids[:changed], (ids[changed] + 1) % 61, *ids[changed + 1 :], *text(TAIL)]
        assert found(prefixes, "a", changed_ids) == found(prefixes, "a", ids + text(TAIL))[: changed // PAGE]


def test_prefix_duplicates_are_kept_once() -> None:
    ids = text(64)
    pool, prefixes = remembered(ids + text(32, seed=1), ids + text(32, seed=2))
    assert len(prefixes.pages) == 8 and pool.free_pages == 4
    assert pool.tables == [[]] and all(pool.allocator.refcounts[page] <= 1 for page in range(1, 13))


def test_prefix_eviction_is_lru_from_end() -> None:
    first_ids = text(80)
    second = text(80, seed=1)
    pool, prefixes = remembered(first_ids, second, first_ids)
    assert prefixes.make_room(4) and pool.free_pages == 4
    assert [len(found(prefixes, "", ids + text(1 + TAIL))) for ids in (first_ids, second)] == [5, 3]
    assert prefixes.make_room(12) and len(prefixes.pages) == 0


def test_prefix_pages_in_use_are_not_evicted() -> None:
    ids = text(80)
    pool, prefixes = remembered(ids)
    pool.attach_prefix(0, prefixes.find("", ids + text(1 + TAIL)).prefix)
    assert not prefixes.make_room(8) and len(prefixes.pages) == 5, "and nothing is given up in vain"
    assert prefixes.make_room(7) and pool.free_pages == 7
    pool.release(0)
    assert prefixes.make_room(12)
    prefixes.close()
    assert pool.free_pages == 12


WINDOW = 40


def check_windows() -> None:
    """Check windows: a text resumes behind any page with a kept window; eviction spares the windows that rows read."""
    with narrow():
        windows = WindowPages(WINDOW, 2 * max_window_pages(WINDOW, 20), 20)
        pool = PagePool(DECODER.config, 1, 40, DECODER.dtype, DECODER.device, windows=windows)
        prefixes = PrefixCache(pool)
        ids = text(200)
        ends = (96, 192)
        pool.reserve(0, 200)
        for start in range(0, 200, 8):
            pool.prepare_pass(range(1), [start + 8])
            pool.lengths_B[0] = start + 8
            if start + 8 in ends:
                prefixes.insert("", ids[: start + 8], pool.tables[0], pool.windows.tables[0])
        pool.release(0)
        assert not pool.windows.allocator.reserved
        for length in range(200):
            prefix, lost_tokens = prefixes.find("", ids[:length] + text(1 + TAIL, seed=7))
            common = length // PAGE * PAGE
            at = max((end for end in ends if end <= common), default=0)
            assert len(prefix.pages) * PAGE == at and lost_tokens == (common if at < common else 0)
            assert all(prefix.window_pages[max(0, at - WINDOW + 1) // PAGE :]), "and page 0 is scratch"
        pool.attach_prefix(0, prefixes.find("", ids[:100] + text(1 + TAIL, seed=7)).prefix)
        pool.reserve(0, 160)
        mapped_pages = [page for page in pool.windows.tables[0] if page]
        pool.windows.allocator.evict(40)
        assert [pool.windows.allocator.refcounts[page] for page in mapped_pages] == [2] * len(mapped_pages), (
            "a row reads these"
        )
        assert len(pool.windows.allocator.free) == pool.windows.allocator.pages - len(mapped_pages)
        pool.release(0)
        prefixes.close()
        assert len(pool.windows.allocator.free) == pool.windows.allocator.pages and pool.free_pages == 40


def test_prefix_goes_on_where_its_window_is_kept() -> None:
    check_windows()


@pytest.mark.parametrize("mutant", caught_in("test_prefix_windows_mutant_is_noticed"), ids=str)
def test_prefix_windows_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        check_windows()
