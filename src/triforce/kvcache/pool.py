"""One pool of KV pages per model. Lengths move, data does not.

A page leaves memory in one of five ways:

- its last owner drops it (`PagePool.release` at the end of a row, `PageOwners.disown`): it is free;
- the prefix cache needs room (`prefix_cache.py: PrefixCache.make_room`): pages that no row owns, least recent first;
- it is behind a row's window (`WindowPages.cover`), or is a window that no row owns (`WindowOwners.evict`);
- its row is swapped out to the host (`engine/engine_core.py: EngineCore.swap_out`), and then dropped as above;
- KV is offloaded: it keeps its owner, and its frame is given to another page (`csrc/frame_table.cpp: take` on a CPU,
  `backends/cuda/offload/frames.py` on a GPU).

Shape suffixes: B rows, P pages of a row, N tokens, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE, KeysValues, OffloadLayout, pages_for
from triforce.backends.kv_rows import kv_dtype, kv_name
from triforce.errors import CacheError
from triforce.interface.outputs import KVMemoryUsage
from triforce.kvcache.feature_memory import FeatureMemory
from triforce.model.config import ModelConfig


class PrefixPages(NamedTuple):
    """Pages of the beginning of a text, all of whose tokens are committed.

    window_pages: those of layers with a window, if these have pages of their own: as many, and 0 for what is gone.
    """

    pages: Sequence[int] = ()
    window_pages: Sequence[int] = ()


NO_PAGES = PrefixPages()


class PageOwners:
    """Pages 1 to `pages` of a memory, whose page 0 is scratch.

    A page may have several owners, rows and others, as nobody writes to it once it is full of what is committed.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages

    @cached_property
    def free(self) -> list[int]:
        """Pages that nobody owns. The list is made when somebody asks: a memory that has no room is refused before."""
        return list(range(1, self.pages + 1))

    @cached_property
    def owners(self) -> list[int]:
        """Count of those who need each page."""
        return [0] * (self.pages + 1)

    def find(self, wanted: int, after: int | None = None) -> list[int]:
        """Return so many of the free pages: consecutive ones where there are such, behind page `after` if possible."""
        candidates = self.free[: len(self.free) - wanted + 1]
        starts = [i for i, page in enumerate(candidates) if self.free[i + wanted - 1] - page == wanted - 1]
        following = [i for i in starts if after is not None and self.free[i] == after + 1]
        i = (following or starts or [0])[0]
        return self.free[i : i + wanted]

    def take(self, pages: Sequence[int]) -> None:
        """Give free pages their first owner."""
        taken = set(pages)
        self.free[:] = [page for page in self.free if page not in taken]
        self.own(pages)

    def own(self, pages: Sequence[int]) -> None:
        """Somebody more needs these pages."""
        for page in pages:
            self.owners[page] += 1

    def disown(self, pages: Sequence[int]) -> list[int]:
        """Somebody less; returns those that nobody needs: they are free."""
        for page in pages:
            self.owners[page] -= 1
        if free := [page for page in pages if not self.owners[page]]:
            self.free[:] = sorted(self.free + free)
        return free


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
        self._loans = list[dict[Any, int]]()

    def lend(self, loan: dict[Any, int]) -> None:
        """Let the pages in `loan` stay while no row needs their room. `evict` takes the first of them out first."""
        self._loans.append(loan)

    def end_loan(self, loan: dict[Any, int]) -> None:
        """Take all pages out of a loan, and add none any more."""
        self.disown(list(loan.values()))
        loan.clear()
        self._loans = [other for other in self._loans if other is not loan]

    def evict(self, pages: int) -> None:
        """Take pages that no row owns out of loans, until `pages` are free."""
        for loan in self._loans:
            idle = (key for key, page in loan.items() if self.owners[page] == 1)
            self.disown([loan.pop(key) for key in list(islice(idle, max(0, pages - len(self.free))))])

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
        self.window = window
        self.most = most_pages(window, widest)
        self.device = device
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
        self.tables[b] = []
        self.firsts[b] = 0
        self.pages_BP[b] = 0

    def adopt(self, b: int, table: Sequence[int]) -> None:
        """A fresh row begins with pages that others own, too; 0 where there are none."""
        self.tables[b] = list(table)
        self.firsts[b] = next((i for i, page in enumerate(table) if page), len(table))
        self.store.own(table[self.firsts[b] :])

    def cover(self, b: int, committed: int, stop: int) -> None:
        """Row b, of so many committed tokens, will write tokens up to `stop`, and read what its windows show.

        Raises CacheError for a pass that is wider than what the row was promised.
        """
        table = self.tables[b]
        first = max(self.firsts[b], self.kept_from(committed))
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


class PagePool:
    """Pages of a model's KV memory by row, and how much of them is committed.

    `more` gives other rows of the same memory: pages are taken from, and given back to, one store.

    Slots below `lengths_B` hold exact, committed values and are written once; slots at or beyond it are working space
    of whichever view runs. Page 0 is scratch: padding is written there and nothing counts that is read from it.

    `unit`: tokens that views pick together at least (see `kernel_api.PageTable`). `int8`: lower views read int8 copies
    of what is committed, or half of each number where that is int8 itself. `least`: the shape to which passes of the
    exact view are padded (see `ForwardBatch`). `room`: pages lie in a store, and so much of them stays. `features`:
    what a feature draft holds of the same pages. `windows`: pages of layers with a window; without it all layers have
    the same ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        unit: int = PAGE,
        int8: bool = False,
        least: tuple[int, int] = (1, 1),
        room: OffloadLayout | None = None,
        features: FeatureMemory | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.unit = unit
        self.least = least
        self.dtype = kv_dtype(config, dtype)
        """Of the rows that its memory reads and writes."""
        self.features = features
        window_pages = windows.store.pages if windows else 0
        self.offloaded = dispatch.offloaded(config, pages, dtype, device, room, window_pages) if room else None
        self.kv = self.offloaded or dispatch.memory(config, pages, dtype, device, unit, int8, window_pages)
        self.store = PageOwners(pages)
        self.windows = windows
        self.apart = [bool(window and windows) for window in config.windows]
        """Of each layer whether its pages are those of `windows`."""
        self.windowed = any(config.windows)
        """Whether some layers see a window."""
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        self.windows = self.windows and self.windows.more(rows)
        self.lengths_B = np.zeros(rows, dtype=np.int64)
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.pages_BP = torch.zeros(rows, 0, dtype=torch.int32, device=self.device)
        """The tables, with scratch pages behind the shorter ones."""
        self._slots: list[Tensor] = [torch.zeros(0, dtype=torch.long, device=self.device) for _ in range(rows)]
        self._first_slot: list[int | None] = [None] * rows  # where the pages of a row are consecutive

    def more(self, rows: int) -> PagePool:
        """Fresh rows of the same memory."""
        other = copy(self)
        other._set_rows(rows)
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was; the pages of the others are free."""
        for b in set(range(len(self.tables))) - set(rows):
            self.release(b)
        if self.windows:
            self.windows.select(rows)
        self.lengths_B = self.lengths_B[list(rows)]
        self.tables = [self.tables[b] for b in rows]
        self._slots = [self._slots[b] for b in rows]
        self._first_slot = [self._first_slot[b] for b in rows]
        self._tabulate()

    def join(self, other: PagePool) -> None:
        """The rows of another pool of the same memory follow these."""
        if self.windows and other.windows:
            self.windows.join(other.windows)
        self.lengths_B = np.concatenate((self.lengths_B, other.lengths_B))
        self.tables += other.tables
        self._slots += other._slots
        self._first_slot += other._first_slot
        self._tabulate()

    @property
    def bytes(self) -> KVMemoryUsage:
        """Bytes of K and V by where they lie, of all rows."""
        if self.offloaded:
            return self.offloaded.bytes
        beside = self.features.bytes if self.features else 0
        spaces = (self.store, self.windows.store if self.windows else self.store)
        tokens = sum((spaces[apart].pages + 1) * PAGE for apart in self.apart)
        return KVMemoryUsage(self.token_bytes // self.config.layers * tokens + beside)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V."""
        return self.config.kv_bytes(self.dtype.itemsize)

    @property
    def kv_dtype(self) -> str:
        """Name of the type of keys and values."""
        return kv_name(self.config, self.dtype)

    @property
    def free_pages(self) -> int:
        return len(self.store.free)

    @property
    def by_layer(self) -> bool:
        """Whether prompts are read layer by layer, so that each page leaves memory once; windows go with the tokens."""
        return self.offloaded is not None and not self.windows

    def reserve(self, b: int, tokens: int) -> None:
        """Give row b the pages for `tokens` tokens in all; consecutive ones where there are such.

        Raises CacheError, and changes nothing, when too few are free, or their store has no room for them.
        """
        wanted = max(pages_for(tokens) - len(self.tables[b]), 0)
        if wanted > self.free_pages:
            raise CacheError(
                f"the KV pool has {self.free_pages} free pages of {PAGE} tokens, {wanted} more are needed. "
                "Use a shorter prompt, a smaller max_tokens or fewer rows at once"
            )
        if self.windows:
            self.windows.reserve(b, tokens)
        if not wanted:
            return
        run = self.store.find(wanted, after=self.tables[b][-1] if self.tables[b] else None)
        if self.offloaded:
            self.offloaded.reserve(run)
        self.store.take(run)
        self._set_table(b, self.tables[b] + run)

    def release(self, b: int) -> None:
        """Take back the pages of row b; it holds no tokens from now on."""
        self.disown(self.tables[b])
        if self.windows:
            self.windows.release(b)
        self._set_table(b, [])
        self.lengths_B[b] = 0

    def adopt(self, b: int, prefix: PrefixPages) -> None:
        """A fresh row begins with pages that others own, too: all of their tokens are committed."""
        self.store.own(prefix.pages)
        if self.windows:
            self.windows.adopt(b, prefix.window_pages)
        self._set_table(b, list(prefix.pages))
        self.lengths_B[b] = len(prefix.pages) * PAGE

    def own(self, pages: Sequence[int], window_pages: Sequence[int] = ()) -> None:
        """Somebody more needs these pages."""
        self.store.own(pages)
        if self.windows:
            self.windows.store.own([page for page in window_pages if page])

    def disown(self, pages: Sequence[int], window_pages: Sequence[int] = ()) -> None:
        """Somebody less; those that nobody needs are free."""
        free = self.store.disown(pages)
        if self.offloaded and free:
            self.offloaded.forget(free)
        if self.windows:
            self.windows.store.disown([page for page in window_pages if page])

    def cover(self, rows: range, stops: Sequence[int]) -> None:
        """See that there are pages for passes that write tokens up to `stops`, and give back what none reads again."""
        if self.windows:
            for b, stop in zip(rows, stops, strict=True):
                self.windows.cover(b, int(self.lengths_B[b]), stop)

    def layers(self, windows: bool) -> list[int]:
        """Return the layers whose pages are those of `windows`, or the others."""
        return [layer for layer, apart in enumerate(self.apart) if apart == windows]

    def held_from(self, layer: int, b: int) -> int:
        """Return from which token on a layer holds row b."""
        return self.windows.firsts[b] * PAGE if self.windows and self.apart[layer] else 0

    def slots(self, b: int, start: int, stop: int, layer: int | None = None) -> Tensor:
        """Return the slots (N) of tokens [start, stop) of row b in a layer; in those without a window."""
        if self.windows and layer is not None and self.apart[layer]:
            return self.windows.slots(b, start, stop)
        return self._slots[b][start:stop]

    def units(self, rows: range, unit: int, windows: bool = False) -> Tensor:
        """All of the tokens of some rows as units of a list: int32 (B, U). windows: for layers that have one."""
        all_BP = self.windows.pages_BP if self.windows and windows else self.pages_BP
        pages_BP = all_BP[rows.start : rows.stop]
        if unit == PAGE:
            return pages_BP
        parts = torch.arange(PAGE // unit, dtype=torch.int32, device=self.device)
        return (pages_BP[..., None] * (PAGE // unit) + parts).flatten(1)

    def span(self, layer: int, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows of K and V of tokens [start, stop) of row b, each (G, N, D); without a copy where that is possible."""
        first = self._first_slot[b]
        if first is None or self.apart[layer]:
            return self.kv.read(layer, self.slots(b, start, stop, layer))
        return self.kv.view(layer, first + start, stop - start)

    def write(self, b: int, length: int, layers: Iterable[KeysValues], start: int = 0) -> None:
        """Let a fresh row go on behind `length` tokens: K and V of each layer's last ones, (G, N, D), bit for bit.

        start: the token from which on layers with a window bring theirs; the others bring all.
        """
        if self.windows:
            self.windows.place(b, start, length)
        for layer, (keys_GND, values_GND) in enumerate(layers):
            slots_N = self.slots(b, self.held_from(layer, b), length, layer)
            last = slice(keys_GND.shape[1] - len(slots_N), None)
            self.kv.write(layer, slots_N, keys_GND[:, last].to(self.device), values_GND[:, last].to(self.device))
        self.lengths_B[b] = length

    def _set_table(self, b: int, table: list[int]) -> None:
        self.tables[b] = table
        self._tabulate()
        pages_P = torch.tensor(table, dtype=torch.long, device=self.device)
        self._slots[b] = (pages_P[:, None] * PAGE + torch.arange(PAGE, device=self.device)).flatten()
        consecutive = bool(table) and table == list(range(table[0], table[0] + len(table)))
        self._first_slot[b] = table[0] * PAGE if consecutive else None

    def _tabulate(self) -> None:
        most = max(map(len, self.tables), default=0)
        padded = [pages + [0] * (most - len(pages)) for pages in self.tables]
        self.pages_BP = torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(padded), most)
        if self.windows:
            self.windows.tabulate(most)


class WindowMark:
    """Windows of a row of a pool, of layers that have pages of their own. They go when rows need their room."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[int, int] = {}
        """Kept pages by their place in the row. The pool takes some out where rows need their room."""
        self._length = 0

    def take(self, b: int) -> None:
        """Keep the windows of row b as it is now, in the place of those that were kept."""
        if windows := self._pool.windows:
            windows.store.end_loan(self._pages)
            self._length = int(self._pool.lengths_B[b])
            self._pages |= {i: windows.tables[b][i] for i in range(windows.firsts[b], pages_for(self._length))}
            windows.store.own(list(self._pages.values()))
            windows.store.lend(self._pages)

    def go_back(self, b: int, length: int) -> None:
        """Give row b, which forgets what is behind `length` tokens, the windows before them, if it lacks them."""
        windows = self._pool.windows
        if windows and not windows.holds(b, length) and length <= self._length:
            first = stop = pages_for(length)
            while first - 1 in self._pages:
                first -= 1
            if first <= windows.needed_from(length):
                windows.forget(b)
                windows.adopt(b, [0] * first + [self._pages[i] for i in range(first, stop)])
                windows.tabulate(self._pool.pages_BP.shape[1])
        self._length = min(self._length, length)  # the row may write to these pages
