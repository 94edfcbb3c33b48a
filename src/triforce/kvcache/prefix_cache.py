"""Prefix cache: pages of cached texts, shared without a copy with texts that begin alike, in any mode.

The key of a full page is a hash of a scope and of all tokens up to the page's end: one scope never finds the pages of
another. Pages that no row references are kept until their memory is needed; the least recently used are evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from triforce.backends.kernel_api import PAGE
from triforce.errors import CacheError
from triforce.kvcache.pool import NO_PAGES, PagePool, PrefixPages
from triforce.kvcache.views.full import TAIL
from triforce.ragged import Ints

Tokens = Sequence[int] | Ints


class PrefixMatch(NamedTuple):
    """Longest cached prefix of a prompt.

    tokens_without_windows: tokens of a longer prefix whose window pages are evicted; 0 if there is none.
    """

    prefix: PrefixPages = NO_PAGES
    tokens_without_windows: int = 0


class PrefixCache:
    """Cache that references pages of a pool, as rows do. Prefixes are multiples of `granularity` tokens."""

    def __init__(self, pool: PagePool, granularity: int = PAGE) -> None:
        self._pool = pool
        self._unit_pages = granularity // PAGE
        self.pages: dict[bytes, int] = {}
        """Pages by key, least recently used first. A text's last page is evicted first: `find` needs the first ones."""
        self.window_pages: dict[bytes, int] = {}
        """Pages of layers with a window, where these have pages of their own. The pool evicts them for rows."""
        if pool.windows:
            pool.windows.allocator.add_evictable(self.window_pages)

    def find(self, scope: str, prompt: Tokens) -> PrefixMatch:
        """Return the longest cached prefix of a prompt, without its last `TAIL` tokens.

        Those are fed, as the first selection needs their queries.
        """
        keys: list[bytes] = []
        for key in _keys(scope, prompt, len(prompt) - 1 - TAIL):
            if key not in self.pages:
                break
            keys.append(key)
        common = len(keys) - len(keys) % self._unit_pages
        stop = self._with_windows(keys[:common])
        return PrefixMatch(self._prefix(keys[:stop]), common * PAGE if stop < common else 0)

    def _prefix(self, keys: list[bytes]) -> PrefixPages:
        pages = [self.pages[key] for key in keys]
        if (windows := self._pool.windows) is None:
            return PrefixPages(pages)
        first_window_page = windows.first_needed_page(len(keys) * PAGE)
        return PrefixPages(
            pages, [0] * first_window_page + [self.window_pages[key] for key in keys[first_window_page:]]
        )

    def _with_windows(self, keys: list[bytes]) -> int:
        """Return the length of the longest prefix of `keys` whose windows are cached, so that a text can go on."""
        if (windows := self._pool.windows) is None:
            return len(keys)
        longest = present_windows = 0
        for stop, key in enumerate(keys, 1):
            present_windows = present_windows + 1 if key in self.window_pages else 0
            if stop - present_windows <= windows.first_needed_page(stop * PAGE) and stop % self._unit_pages == 0:
                longest = stop
        return longest

    def insert(self, scope: str, text: Tokens, table: Sequence[int], window_table: Sequence[int] = ()) -> None:
        """Add the full pages of a committed text. table, window_table: its row's pages."""
        keys = list(_keys(scope, text, len(text)))
        new_pages = self._insert(self.pages, table, keys)
        new_window_pages = self._insert(self.window_pages, window_table, keys)
        self._pool.incref(new_pages, new_window_pages)
        if self._pool.offloaded:  # a page is stored with the next pass of its row, which may never come
            with suppress(CacheError):
                self._pool.offloaded.commit(new_pages)

    def _insert(self, pages_by_key: dict[bytes, int], table: Sequence[int], keys: list[bytes]) -> list[int]:
        """Add the pages of a table, or mark them as most recently used. Returns the pages that are new."""
        new_pages: list[int] = []
        for key, page in reversed([pair for pair in zip(keys, table, strict=False) if pair[1]]):
            if (cached_page := pages_by_key.pop(key, None)) is None:
                new_pages.append(page)
            pages_by_key[key] = page if cached_page is None else cached_page
        return new_pages

    def locate(self, scope: str, text: Tokens) -> Callable[[int, int], PrefixPages | None]:
        """Return a function that gives the pages of tokens [start, stop) of a text; None once some are evicted.

        Pages of layers with a window are 0 once they are evicted.
        """
        keys = list(_keys(scope, text, len(text)))

        def pages(start: int, stop: int) -> PrefixPages | None:
            range_keys = keys[start // PAGE : stop // PAGE]
            cached_pages = [self.pages[key] for key in range_keys if key in self.pages]
            window_pages = [self.window_pages.get(key, 0) for key in range_keys]
            return PrefixPages(cached_pages, window_pages) if len(cached_pages) == (stop - start) // PAGE else None

        return pages

    @property
    def available_pages(self) -> int:
        """Count of pages that are free or evictable."""
        return self._pool.free_pages + len(self._idle())

    def _idle(self) -> list[bytes]:
        """Return the keys of pages that no row references, the least recently used first."""
        return [key for key, page in self.pages.items() if self._pool.allocator.refcounts[page] == 1]

    def make_room(self, pages: int) -> bool:
        """Evict pages until `pages` pages are free. Returns False, and evicts none, where there are too few."""
        pool = self._pool
        idle = self._idle()
        missing = pages - pool.free_pages
        if missing > len(idle):
            return False
        evicted_keys = idle[: max(missing, 0)]
        evicted_windows = [self.window_pages.pop(key) for key in evicted_keys if key in self.window_pages]
        pool.decref([self.pages.pop(key) for key in evicted_keys], evicted_windows)
        return True

    def close(self) -> None:
        """Drop all pages. The pool evicts no pages of this cache afterwards."""
        self._pool.decref(list(self.pages.values()))
        self.pages.clear()
        if self._pool.windows:
            self._pool.windows.allocator.drop_evictable(self.window_pages)


def _keys(scope: str, text: Tokens, tokens: int) -> Iterator[bytes]:
    """Yield the keys of the full pages of the first `tokens` tokens, each a hash of the key before it."""
    key = scope.encode()
    ids = np.asarray(text, dtype=np.int64)
    for start in range(0, tokens - PAGE + 1, PAGE):
        key = blake2b(key + ids[start : start + PAGE].tobytes(), digest_size=16).digest()
        yield key
