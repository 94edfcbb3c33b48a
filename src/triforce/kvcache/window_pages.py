"""Pages of the layers that have a window, apart from those of the others: of each row what its passes may still read.

A row's table has a place for each page of its text, as that of whole rows has. So positions are those of whole rows;
what is behind the window is page 0 there, of which nothing counts that a pass reads.
Shape suffixes: B rows, P pages of a row, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from weakref import WeakMethod

import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE, pages_for
from triforce.errors import CacheError
from triforce.kvcache.page_owners import PageOwners

SLACK = 1024
"""Tokens behind a window that are kept, too: a text that branches off so far from its end still finds its window."""


def most_pages(window: int, widest: int) -> int:
    """Pages that a row holds at most, however long it is, whose passes have at most `widest` tokens."""
    return pages_for(window - 1 + SLACK + widest) + 1


def pages_of_rows(windows: Sequence[int], pages: int, rows: int, widest: int) -> int:
    """Pages for what so many rows keep of layers with these windows, and for windows of as much that no row needs.

    They are no more than `pages`, those of other layers; 0 where no layer has a window.
    """
    return min(pages, (rows + 1) * most_pages(max(windows), widest)) if any(windows) else 0


class WindowOwners(PageOwners):
    """Pages that rows are promised. What they hold is never more, so all others can be had."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.promised = 0
        self._lent: list[WeakMethod[Callable[[int], None]]] = []

    def lend(self, evict: Callable[[int], None]) -> None:
        """Let somebody keep pages that no row needs, as long as he lives; his method gives so many back."""
        mine = WeakMethod(evict)
        self._lent = [each for each in self._lent if each() and each != mine] + [mine]

    def evict(self, pages: int) -> None:
        """Have so many pages given back that no row needs."""
        for each in self._lent:
            if len(self.free) < pages and (evict := each()):
                evict(pages)

    def promise(self, more: int) -> None:
        """Promise rows so many pages more. Raises CacheError, and promises none, where there are too few."""
        if self.promised + more > self.pages:
            raise CacheError(
                f"the layers with a window have {self.pages - self.promised} pages of KV left, {more} more are needed. "
                "Use fewer rows at once"
            )
        self.promised += more

    def next(self, after: int | None) -> int:
        """Take a page, behind page `after` if possible."""
        if not self.free:
            self.evict(1)
        (page,) = self.find(1, after)
        self.take([page])
        return page


class WindowPages:
    """Pages by row. window: the largest of the layers. widest: tokens of a pass at most, beyond the committed length.

    Before a pass `cover` gives back what lies `SLACK` tokens behind the window of the committed length, which never
    falls but where somebody asks `holds` first, and takes what the pass writes to.
    """

    def __init__(self, window: int, pages: int, widest: int, device: torch.device) -> None:
        self.window, self.most, self.device = window, most_pages(window, widest), device
        self.store = WindowOwners(pages)
        self._set_rows(0)

    def _set_rows(self, rows: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.firsts = [0] * rows
        """The first page of each row that is still there; pages from there on hold all of their committed tokens."""
        self._rooms = [0] * rows  # pages that each row is promised
        self.pages_BP = torch.zeros(rows, 0, dtype=torch.int32, device=self.device)

    def more(self, rows: int) -> WindowPages:
        """Fresh rows of the same pages."""
        other = copy(self)
        other._set_rows(rows)
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was. The others have been released."""
        self.tables = [self.tables[b] for b in rows]
        self.firsts, self._rooms = ([each[b] for b in rows] for each in (self.firsts, self._rooms))

    def join(self, other: WindowPages) -> None:
        """The rows of others of the same pages follow these."""
        self.tables += other.tables
        self.firsts += other.firsts
        self._rooms += other._rooms

    def tabulate(self, most: int) -> None:
        """Make `pages_BP` anew, of so many pages for each row."""
        padded = [table + [0] * (most - len(table)) for table in self.tables]
        self.pages_BP = torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(padded), most)

    def room(self, tokens: int) -> int:
        """Pages that a row of so many tokens is promised."""
        return min(pages_for(tokens), self.most)

    def reserve(self, b: int, tokens: int) -> None:
        """Promise row b what it needs to grow to so many tokens. Raises CacheError, and changes nothing."""
        more = max(self.room(tokens) - self._rooms[b], 0)
        self.store.promise(more)
        self._rooms[b] += more

    def release(self, b: int) -> None:
        """Take back the pages of row b, and what it was promised."""
        self.forget(b)
        self.store.promised -= self._rooms[b]
        self._rooms[b] = 0

    def forget(self, b: int) -> None:
        """Take back the pages of row b, whose text is read from its start again."""
        self.store.disown([page for page in self.tables[b] if page])
        self.tables[b], self.firsts[b] = [], 0
        self.pages_BP[b] = 0

    def adopt(self, b: int, table: Sequence[int]) -> None:
        """A fresh row begins with pages that others own, too; 0 where there are none."""
        self.tables[b], self.firsts[b] = list(table), next((i for i, page in enumerate(table) if page), len(table))
        self.store.own(table[self.firsts[b] :])

    def cover(self, b: int, committed: int, stop: int) -> None:
        """Row b, of so many committed tokens, will write tokens up to `stop`, and read what its windows show.

        Raises CacheError for a pass that is wider than what the row was promised.
        """
        table, first = self.tables[b], max(self.firsts[b], self.kept_from(committed))
        if pages_for(stop) - first > self._rooms[b]:
            raise CacheError(
                f"a pass up to token {stop} behind {committed} is wider than the {self._rooms[b]} pages of its row's "
                "windows; feed fewer tokens at once"
            )
        behind = range(self.firsts[b], min(first, len(table)))
        self.store.disown([table[i] for i in behind])
        for i in behind:
            table[i] = 0
        self.pages_BP[b, behind.start : behind.stop] = 0
        self.firsts[b] = first
        self._extend(b, stop)

    def place(self, b: int, start: int, stop: int) -> None:
        """Fresh row b will be written its tokens from `start` to `stop`, the latest of which it keeps."""
        self.firsts[b] = max(pages_for(start), self.kept_from(stop))
        self.tables[b] = [0] * self.firsts[b]
        self._extend(b, stop)

    def holds(self, b: int, length: int) -> bool:
        """Whether row b holds what a pass behind so many of its tokens reads."""
        return self.firsts[b] <= self.needed_from(length)

    def needed_from(self, length: int) -> int:
        """The first page that a pass behind so many tokens reads."""
        return max(0, length - self.window + 1) // PAGE

    def slots(self, b: int, start: int, stop: int) -> Tensor:
        """Return the slots (N) of tokens [start, stop) of row b."""
        pages_P = torch.tensor(self.tables[b][start // PAGE : pages_for(stop)], dtype=torch.long, device=self.device)
        slots_N = (pages_P[:, None] * PAGE + torch.arange(PAGE, device=self.device)).flatten()
        return slots_N[start % PAGE : start % PAGE + stop - start]

    def kept_from(self, committed: int) -> int:
        """The first page that is kept of a row of so many committed tokens."""
        return self.needed_from(max(0, committed - SLACK))

    def _extend(self, b: int, stop: int) -> None:
        table = self.tables[b]
        for i in range(len(table), pages_for(stop)):
            table.append(self.store.next(table[-1] if table else None))
            self.pages_BP[b, i] = table[i]
