"""Pages of offloaded KV that are being written, and so have a place on the device: decided on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from triforce.backends.kernel_api import PAGE
from triforce.errors import CacheError


class WriteSlots:
    """Seats 1 to `count` for pages 1 to `pages`, each in all layers alike.

    A page is `fresh` from when it is written until the store has it as it is; others lose their seat when it is wanted.
    """

    def __init__(self, pages: int, count: int) -> None:
        self.seat_P = np.zeros(pages + 1, np.int64)
        self.stored_P = np.zeros(pages + 1, np.bool_)
        self._fresh: set[int] = set()
        self._free = list(range(count, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        """Pages that have seats, as they were last written."""

    def leaving(self, table: Sequence[int], length: int) -> list[int]:
        """The fresh pages of a row that are full of committed tokens: they are stored from now on."""
        left, last = [], length // PAGE
        while last and table[last - 1] in self._fresh:
            last -= 1
            left.append(table[last])
        self.store(left)
        return left

    def fresh(self, pages: Iterable[int]) -> list[int]:
        """Return those of some pages that the store does not hold as they are."""
        return [page for page in pages if page in self._fresh]

    @property
    def known(self) -> list[int]:
        """All pages that hold something, ascending."""
        return [int(page) for page in (self.stored_P | (self.seat_P > 0)).nonzero()[0]]

    def store(self, pages: Sequence[int]) -> None:
        """The store has them as they are."""
        self._fresh.difference_update(pages)
        self.stored_P[list(pages)] = True

    def making_room(self, pages: Sequence[int]) -> list[int]:
        """Return the pages that must `leave` so that these can be written. Raises CacheError if that is not enough.

        Those that have not been written to for longest; of what the store has not as it is, the less the better.
        """
        wanted = sum(not self.seat_P[page] for page in pages) - len(self._free)
        if wanted <= 0:
            return []
        others = [page for page in self._lru if page not in set(pages)]
        if len(others) < wanted:
            raise CacheError("too many texts are being written at once for --kv-memory; give more, or fewer texts")
        return sorted(others, key=self._fresh.__contains__)[:wanted]

    def write(self, pages: Sequence[int]) -> list[int]:
        """Seat pages that are about to be written; return those that had no seat."""
        new = [page for page in pages if not self.seat_P[page]]
        for page in pages:
            self.seat_P[page] = self.seat_P[page] or self._free.pop()
            self._lru[page] = None
            self._lru.move_to_end(page)
        self._fresh.update(pages)
        return new

    def leave(self, pages: Iterable[int]) -> None:
        """Take the seats of these pages."""
        for page in pages:
            if seat := int(self.seat_P[page]):
                self._free.append(seat)
                self.seat_P[page] = 0
                del self._lru[page]
            self._fresh.discard(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Forget what these pages hold."""
        self.leave(pages)
        self.stored_P[list(pages)] = False
