"""Pages of texts that have been read, for others that begin alike: computed once, shared without a copy.

A full page is known by all tokens up to its end, and by a scope: what one scope has read, another never finds. Pages
that no row needs are kept as long as nobody wants their room; the least recently used go first.
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


class Found(NamedTuple):
    """The beginning of a prompt that is known. lost: tokens that are, too, but for the windows behind them."""

    prefix: PrefixPages = NO_PAGES
    lost: int = 0


class PrefixCache:
    """Beside rows an owner of pages of a pool. Texts are shared in whole multiples of `whole` tokens."""

    def __init__(self, pool: PagePool, whole: int = PAGE) -> None:
        self._pool = pool
        self._pages_shared = whole // PAGE
        self.pages: dict[bytes, int] = {}
        """Oldest first; of a text its end is older than its beginning, without which nobody would find it."""
        self.window_pages: dict[bytes, int] = {}
        """Of layers with a window, where these have pages of their own. Rows may need them back at any time."""
        if pool.windows:
            pool.windows.store.lend(self.window_pages)

    def find(self, scope: str, prompt: Tokens) -> Found:
        """Find the beginning of a prompt. Its last tokens are left to be fed, as a selection goes by them."""
        keys: list[bytes] = []
        for key in _keys(scope, prompt, len(prompt) - 1 - TAIL):
            if key not in self.pages:
                break
            keys.append(key)
        common = len(keys) - len(keys) % self._pages_shared
        stop = self._with_windows(keys[:common])
        return Found(self._prefix(keys[:stop]), common * PAGE if stop < common else 0)

    def _prefix(self, keys: list[bytes]) -> PrefixPages:
        pages = [self.pages[key] for key in keys]
        if (windows := self._pool.windows) is None:
            return PrefixPages(pages)
        first = windows.needed_from(len(keys) * PAGE)
        return PrefixPages(pages, [0] * first + [self.window_pages[key] for key in keys[first:]])

    def _with_windows(self, keys: list[bytes]) -> int:
        """Count the first of these pages that a text can go on behind, as their windows are there."""
        if (windows := self._pool.windows) is None:
            return len(keys)
        longest = there = 0
        for stop, key in enumerate(keys, 1):
            there = there + 1 if key in self.window_pages else 0
            if stop - there <= windows.needed_from(stop * PAGE) and stop % self._pages_shared == 0:
                longest = stop
        return longest

    def note(self, scope: str, text: Tokens, table: Sequence[int], window_table: Sequence[int] = ()) -> None:
        """Keep the full pages of a text, all of it committed, which lie in the pages of these tables."""
        keys = list(_keys(scope, text, len(text)))
        new, windows = (self._keep(*each, keys) for each in ((self.pages, table), (self.window_pages, window_table)))
        self._pool.own(new, windows)
        if self._pool.offloaded:  # no pass of their row may follow, with which they would leave
            with suppress(CacheError):
                self._pool.offloaded.commit(new)

    def _keep(self, known: dict[bytes, int], table: Sequence[int], keys: list[bytes]) -> list[int]:
        """Return pages of a table that are new, those of tokens that were not known. They are the latest ones now."""
        new: list[int] = []
        for key, page in reversed([pair for pair in zip(keys, table, strict=False) if pair[1]]):
            if (held := known.pop(key, None)) is None:
                new.append(page)
            known[key] = page if held is None else held
        return new

    def locate(self, scope: str, text: Tokens) -> Callable[[int, int], PrefixPages | None]:
        """Return a function that gives the pages of tokens [start, stop) of a text, or None once some are gone.

        Those of layers with a window are 0 once they are gone.
        """
        keys = list(_keys(scope, text, len(text)))

        def pages(start: int, stop: int) -> PrefixPages | None:
            some = keys[start // PAGE : stop // PAGE]
            found = [self.pages[key] for key in some if key in self.pages]
            windows = [self.window_pages.get(key, 0) for key in some]
            return PrefixPages(found, windows) if len(found) == (stop - start) // PAGE else None

        return pages

    @property
    def room(self) -> int:
        """Pages that are free, or that no row needs."""
        return self._pool.free_pages + len(self._idle())

    def _idle(self) -> list[bytes]:
        """Keys of pages that no row needs, the oldest first."""
        return [key for key, page in self.pages.items() if self._pool.store.owners[page] == 1]

    def make_room(self, pages: int) -> bool:
        """See that so many pages are free, if that can be had."""
        pool = self._pool
        idle = self._idle()
        missing = pages - pool.free_pages
        if missing > len(idle):
            return False
        gone = idle[: max(missing, 0)]
        without = [self.window_pages.pop(key) for key in gone if key in self.window_pages]
        pool.disown([self.pages.pop(key) for key in gone], without)
        return True

    def close(self) -> None:
        """Forget all texts, and keep no pages any more."""
        self._pool.disown(list(self.pages.values()))
        self.pages.clear()
        if self._pool.windows:
            self._pool.windows.store.end_loan(self.window_pages)


def _keys(scope: str, text: Tokens, tokens: int) -> Iterator[bytes]:
    """Keys of the full pages among the first `tokens`."""
    key = scope.encode()
    ids = np.asarray(text, dtype=np.int64)
    for start in range(0, tokens - PAGE + 1, PAGE):
        key = blake2b(key + ids[start : start + PAGE].tobytes(), digest_size=16).digest()
        yield key
