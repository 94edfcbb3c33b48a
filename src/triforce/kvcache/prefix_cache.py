"""Pages of texts that have been read, for others that begin alike: computed once, shared without a copy.

A full page is known by all tokens up to its end, and by a scope: what one scope has read, another never finds. Pages
that no row needs are kept as long as nobody wants their room; the least recently used go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from triforce.backends.kernel_api import PAGE
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.full import TAIL
from triforce.ragged import Ints

Tokens = Sequence[int] | Ints


class PrefixCache:
    """Beside rows an owner of pages of a pool. Texts are shared in whole multiples of `whole` tokens."""

    def __init__(self, pool: PagePool, whole: int = PAGE) -> None:
        self._pool, self._pages_shared = pool, whole // PAGE
        self.pages: dict[bytes, int] = {}
        """Oldest first; of a text its end is older than its beginning, without which nobody would find it."""

    def find(self, scope: str, prompt: Tokens) -> list[int]:
        """Pages with the beginning of a prompt. Its last tokens are left to be fed, as a selection goes by them."""
        found: list[int] = []
        for key in _keys(scope, prompt, len(prompt) - 1 - TAIL):
            if key not in self.pages:
                break
            found.append(self.pages[key])
        return found[: len(found) - len(found) % self._pages_shared]

    def note(self, scope: str, text: Tokens, table: Sequence[int]) -> None:
        """Keep the full pages of a text, all of it committed, which lie in the pages of a table."""
        known = list(zip(_keys(scope, text, len(text)), table, strict=False))
        for key, page in reversed(known):
            if (held := self.pages.pop(key, None)) is None:
                self._pool.own([page])
            self.pages[key] = page if held is None else held

    def locate(self, scope: str, text: Tokens) -> Callable[[int, int], list[int] | None]:
        """Return a function that gives the pages of tokens [start, stop) of a text, or None once some are gone."""
        keys = list(_keys(scope, text, len(text)))

        def pages(start: int, stop: int) -> list[int] | None:
            found = [self.pages[key] for key in keys[start // PAGE : stop // PAGE] if key in self.pages]
            return found if len(found) == (stop - start) // PAGE else None

        return pages

    def make_room(self, pages: int) -> bool:
        """See that so many pages are free, if that can be had."""
        pool = self._pool
        idle = [key for key, page in self.pages.items() if pool.owners[page] == 1]
        missing = pages - pool.free_pages
        if missing > len(idle):
            return False
        pool.disown([self.pages.pop(key) for key in idle[: max(missing, 0)]])
        return True

    def clear(self) -> None:
        """Forget all texts."""
        self._pool.disown(list(self.pages.values()))
        self.pages.clear()


def _keys(scope: str, text: Tokens, tokens: int) -> Iterator[bytes]:
    """Keys of the full pages among the first `tokens`."""
    key, ids = scope.encode(), np.asarray(text, dtype=np.int64)
    for start in range(0, tokens - PAGE + 1, PAGE):
        key = blake2b(key + ids[start : start + PAGE].tobytes(), digest_size=16).digest()
        yield key
