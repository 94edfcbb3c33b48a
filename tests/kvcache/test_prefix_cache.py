"""Shared beginnings: found by all tokens before them and by their scope; the oldest are given up first, end first."""

from __future__ import annotations

import pytest

from tests.helpers.small_decoder import small_decoder, text
from triforce.kvcache import PAGE, PagePool
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import TAIL

DECODER = small_decoder()


def remembered(*texts: list[int], scope: str = "") -> tuple[PagePool, PrefixCache]:
    """Texts that a row each has seen, which is gone."""
    pool = PagePool(DECODER.config, 1, 12, DECODER.dtype, DECODER.device)
    prefixes = PrefixCache(pool)
    for one in texts:
        pool.adopt(0, prefixes.find(scope, one + text(1 + TAIL)))
        pool.reserve(0, len(one))
        prefixes.note(scope, one, pool.tables[0])
        pool.release(0)
    return pool, prefixes


@pytest.mark.parametrize("length", [1, PAGE, TAIL, PAGE + TAIL, PAGE + TAIL + 1, 100])
def test_prefix_match_leaves_last_tokens_uncached(length: int) -> None:
    ids = text(100)
    _, prefixes = remembered(ids)
    assert len(prefixes.pages) == 6
    assert len(prefixes.find("", ids[:length])) == max(0, length - 1 - TAIL) // PAGE


def test_prefix_is_keyed_by_tokens_and_scope() -> None:
    ids = text(100)
    _, prefixes = remembered(ids, scope="a")
    assert not prefixes.find("b", ids)
    for changed in (0, 15, 16, 50):
        other = [*ids[:changed], (ids[changed] + 1) % 61, *ids[changed + 1 :], *text(TAIL)]
        assert prefixes.find("a", other) == prefixes.find("a", ids + text(TAIL))[: changed // PAGE]


def test_prefix_duplicates_are_kept_once() -> None:
    ids = text(64)
    pool, prefixes = remembered(ids + text(32, seed=1), ids + text(32, seed=2))
    assert len(prefixes.pages) == 8 and pool.free_pages == 4
    assert pool.tables == [[]] and all(pool.owners[page] <= 1 for page in range(1, 13))


def test_prefix_eviction_is_lru_from_end() -> None:
    first, second = text(80), text(80, seed=1)
    pool, prefixes = remembered(first, second, first)
    assert prefixes.make_room(4) and pool.free_pages == 4
    assert len(prefixes.find("", second + text(1 + TAIL))) == 3 and len(prefixes.find("", first + text(1 + TAIL))) == 5
    assert prefixes.make_room(12) and len(prefixes.pages) == 0


def test_prefix_pages_in_use_are_not_evicted() -> None:
    ids = text(80)
    pool, prefixes = remembered(ids)
    pool.adopt(0, prefixes.find("", ids + text(1 + TAIL)))
    assert not prefixes.make_room(8) and len(prefixes.pages) == 5, "and nothing is given up in vain"
    assert prefixes.make_room(7) and pool.free_pages == 7
    pool.release(0)
    assert prefixes.make_room(12)
    prefixes.clear()
    assert pool.free_pages == 12
