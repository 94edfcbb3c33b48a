"""WindowMark: windows at a place of a text, which its row can go back to once they are behind its own."""

from __future__ import annotations

from triforce.backends.kernel_api import pages_for
from triforce.kvcache.pool import PagePool


class WindowMark:
    """Windows of a row of a pool, of layers that have pages of their own. They go when rows need their room."""

    def __init__(self, pool: PagePool) -> None:
        self._pool, self._table, self._length = pool, list[int](), 0

    def take(self, b: int) -> None:
        """Keep the windows of row b as it is now, in the place of those that were kept."""
        self.drop()
        if windows := self._pool.windows:
            self._length = int(self._pool.lengths_B[b])
            self._table = windows.tables[b][: pages_for(self._length)]
            windows.store.own(self._table[windows.firsts[b] :])
            windows.store.lend(self.drop)

    def drop(self, pages: int = 0) -> None:
        """Keep none, however few are asked for."""
        self._pool.disown((), self._table)
        self._table, self._length = [], 0

    def go_back(self, b: int, length: int) -> None:
        """Row b forgets what is behind so many tokens: give it the windows before them, if it lacks them."""
        windows, first = self._pool.windows, next((i for i, page in enumerate(self._table) if page), 0)
        if windows and not windows.holds(b, length) and length <= self._length and first <= windows.needed_from(length):
            windows.forget(b)
            windows.adopt(b, self._table[: pages_for(length)])
            windows.tabulate(self._pool.pages_BP.shape[1])
        self._length = min(self._length, length)  # the row may write to these pages
