"""One pool of KV pages per model. A rewind changes the length of a row, and moves no data.

A page leaves memory in one of five ways:

- Its last reference is dropped (`PagePool.release` at the end of a row, `PageAllocator.decref`): the page is free.
- The prefix cache needs free pages (`prefix_cache.py: PrefixCache.make_room`): it evicts pages that no row references,
  least recently used first.
- The page lies before a row's window (`WindowPages.prepare_pass`), or holds a window that no row references
  (`WindowAllocator.evict`).
- Its row is swapped out to the host (`engine/engine_core.py: EngineCore.swap_out`), and then dropped as above.
- KV is offloaded: the page keeps its row, and its frame is given to another page (`csrc/frame_table.cpp: take` on a
  CPU, `backends/cuda/offload/frames.py` on a GPU).

Shape suffixes: B rows, P pages of a row, N tokens, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import Array, DType, itemsize
from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE, KeysValues, OffloadLayout, pages_for
from triforce.errors import CacheError
from triforce.interface.outputs import KVMemoryUsage
from triforce.kvcache.eagle_memory import EagleHeadMemory
from triforce.model.config import ModelConfig
from triforce.model.kv_rows import kv_dtype
from triforce.ragged import Ints


class PrefixPages(NamedTuple):
    """Pages of a text's prefix. All of its tokens are committed.

    window_pages: pages of the layers with a window, if these have pages of their own. There is one entry for each entry
    of `pages`; 0 stands for a page that was evicted.
    """

    pages: Sequence[int] = ()
    window_pages: Sequence[int] = ()


NO_PAGES = PrefixPages()


class PageAllocator:
    """Allocator of pages 1 to `pages` of a memory. Page 0 is scratch.

    Rows and caches may share a page: a page that is full of committed tokens is never written to again.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages

    @cached_property
    def free(self) -> list[int]:
        """Pages without a reference, ascending.

        The list is made on first use: a memory that is too large is refused before that.
        """
        return list(range(1, self.pages + 1))

    @cached_property
    def refcounts(self) -> list[int]:
        """Count of references to each page, by page number."""
        return [0] * (self.pages + 1)

    def find_free(self, page_count: int, previous_page: int | None = None) -> list[int]:
        """Return `page_count` free pages: consecutive ones if there are such, right after `previous_page` if possible.

        It does not allocate them.
        """
        candidates = self.free[: len(self.free) - page_count + 1]
        starts = [i for i, page in enumerate(candidates) if self.free[i + page_count - 1] - page == page_count - 1]
        following = [i for i in starts if previous_page is not None and self.free[i] == previous_page + 1]
        i = (following or starts or [0])[0]
        return self.free[i : i + page_count]

    def allocate(self, pages: Sequence[int]) -> None:
        """Take these free pages out of the free list, with one reference each."""
        taken = set(pages)
        self.free[:] = [page for page in self.free if page not in taken]
        self.incref(pages)

    def incref(self, pages: Sequence[int]) -> None:
        """Add one reference to each of these pages."""
        for page in pages:
            self.refcounts[page] += 1

    def decref(self, pages: Sequence[int]) -> list[int]:
        """Drop one reference of each of these pages. Pages at zero become free; returns them."""
        for page in pages:
            self.refcounts[page] -= 1
        if free := [page for page in pages if not self.refcounts[page]]:
            self.free[:] = sorted(self.free + free)
        return free


SLACK = 1024
"""Tokens before a window that are kept as well: a text that branches off at most this far before its end still finds
its window."""


def max_window_pages(window: int, widest: int) -> int:
    """Return the most window pages that a row of any length holds. widest: most tokens of a pass."""
    return pages_for(window - 1 + SLACK + widest) + 1


def window_pages_for_rows(windows: Sequence[int], pages: int, rows: int, widest: int) -> int:
    """Pages of layers with these windows: those of `rows` rows, and those of one more row for evictable windows.

    The count is at most `pages`, that of the other layers; it is 0 where no layer has a window.
    """
    return min(pages, (rows + 1) * max_window_pages(max(windows), widest)) if any(windows) else 0


class WindowAllocator(PageAllocator):
    """Allocator that reserves pages for rows. Rows hold at most what is reserved, so all other pages are evictable."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.reserved = 0
        self._evictable = list[dict[Any, int]]()

    def add_evictable(self, pages_by_key: dict[Any, int]) -> None:
        """Register the dict of a cache. `evict` removes its entries when rows need pages, first entries first."""
        self._evictable.append(pages_by_key)

    def drop_evictable(self, pages_by_key: dict[Any, int]) -> None:
        """Drop all pages of a registered dict, clear it and unregister it."""
        self.decref(list(pages_by_key.values()))
        pages_by_key.clear()
        self._evictable = [registered for registered in self._evictable if registered is not pages_by_key]

    def evict(self, pages: int) -> None:
        """Remove pages that no row references from the registered dicts, until `pages` pages are free."""
        for pages_by_key in self._evictable:
            idle = (key for key, page in pages_by_key.items() if self.refcounts[page] == 1)
            self.decref([pages_by_key.pop(key) for key in list(islice(idle, max(0, pages - len(self.free))))])

    def reserve(self, page_count: int) -> None:
        """Reserve `page_count` more pages for rows. Raises CacheError, and reserves none, where there are too few."""
        if self.reserved + page_count > self.pages:
            raise CacheError(
                f"the layers with a window have {self.pages - self.reserved} pages of KV left, and this row needs "
                f"{page_count}. Use fewer rows at once"
            )
        self.reserved += page_count

    def allocate_next(self, previous_page: int | None) -> int:
        """Allocate one page, right after `previous_page` if possible. It evicts a page where none is free."""
        if not self.free:
            self.evict(1)
        (page,) = self.find_free(1, previous_page)
        self.allocate([page])
        return page


def padded_tables(tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Return page tables as an array of `width` pages a row, int32. Shorter rows end with the scratch page."""
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return np.array(padded, np.int32).reshape(len(padded), width)


def slots_of_pages(pages: Sequence[int]) -> Ints:
    """Return the slots (N) of all tokens of pages, in order."""
    return (np.array(pages, np.int64)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


class WindowPages:
    """Pages, by row, of the layers with a window.

    window: the largest of the layers' windows. widest: tokens of a pass at most, beyond the committed length.

    Before a pass `prepare_pass` frees the pages that lie more than `SLACK` tokens before the window of the committed
    length, and allocates the pages that the pass writes to. The committed length never falls unless the caller has
    asked `holds` first.
    """

    def __init__(self, window: int, pages: int, widest: int) -> None:
        self.window = window
        self.max_pages = max_window_pages(window, widest)
        self.allocator = WindowAllocator(pages)
        self._set_rows(0)

    def _set_rows(self, rows: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.first_pages = [0] * rows
        """Index of each row's first page that is still there. Pages from there on hold all their committed tokens."""
        self._reserved = [0] * rows  # pages that are reserved for each row
        self.pages_BP: NDArray[np.int32] = np.zeros((rows, 0), np.int32)

    def new_rows(self, rows: int) -> WindowPages:
        """Return `rows` empty rows of the same pages."""
        new_pages = copy(self)
        new_pages._set_rows(rows)
        return new_pages

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. The caller has released the other rows."""
        self.tables = [self.tables[b] for b in rows]
        self.first_pages, self._reserved = ([counts[b] for b in rows] for counts in (self.first_pages, self._reserved))

    def join(self, other: WindowPages) -> None:
        """Append the rows of `other`, which has the same pages."""
        self.tables += other.tables
        self.first_pages += other.first_pages
        self._reserved += other._reserved

    def tabulate(self, width: int) -> None:
        """Rebuild `pages_BP` with `width` pages a row."""
        self.pages_BP = padded_tables(self.tables, width)

    def reserved_pages(self, tokens: int) -> int:
        """Return the pages that are reserved for a row of `tokens` tokens."""
        return min(pages_for(tokens), self.max_pages)

    def reserve(self, b: int, tokens: int) -> None:
        """Reserve the pages that row b needs to grow to `tokens` tokens. Raises CacheError, and changes nothing."""
        missing_pages = max(self.reserved_pages(tokens) - self._reserved[b], 0)
        self.allocator.reserve(missing_pages)
        self._reserved[b] += missing_pages

    def release(self, b: int) -> None:
        """Drop the pages of row b and its reservation."""
        self.clear(b)
        self.allocator.reserved -= self._reserved[b]
        self._reserved[b] = 0

    def clear(self, b: int) -> None:
        """Drop the pages of row b, whose text is read from its start again."""
        self.allocator.decref([page for page in self.tables[b] if page])
        self.tables[b] = []
        self.first_pages[b] = 0
        self.pages_BP[b] = 0

    def attach_prefix(self, b: int, table: Sequence[int]) -> None:
        """Start empty row b with shared pages; 0 stands for a page that is not there."""
        self.tables[b] = list(table)
        self.first_pages[b] = next((i for i, page in enumerate(table) if page), len(table))
        self.allocator.incref(table[self.first_pages[b] :])

    def prepare_pass(self, b: int, committed: int, stop: int) -> None:
        """Prepare row b of `committed` tokens for a pass that writes tokens up to `stop` and reads its windows.

        Raises CacheError for a pass that is wider than the row's reservation.
        """
        table = self.tables[b]
        first_page = max(self.first_pages[b], self.first_kept_page(committed))
        if pages_for(stop) - first_page > self._reserved[b]:
            raise CacheError(
                f"a pass from token {committed} to {stop} needs more than the {self._reserved[b]} window pages of its "
                "row; feed fewer tokens at once"
            )
        expired = range(self.first_pages[b], min(first_page, len(table)))
        self.allocator.decref([table[i] for i in expired])
        for i in expired:
            table[i] = 0
        self.pages_BP[b, expired.start : expired.stop] = 0
        self.first_pages[b] = first_page
        self._extend(b, stop)

    def allocate_row(self, b: int, start: int, stop: int) -> None:
        """Allocate pages of empty row b for its tokens from `start` to `stop`, as far as these are kept."""
        self.first_pages[b] = max(pages_for(start), self.first_kept_page(stop))
        self.tables[b] = [0] * self.first_pages[b]
        self._extend(b, stop)

    def holds(self, b: int, length: int) -> bool:
        """Whether row b holds all that a pass after its first `length` tokens reads."""
        return self.first_pages[b] <= self.first_needed_page(length)

    def first_needed_page(self, length: int) -> int:
        """Return the first page that a pass after `length` tokens reads."""
        return max(0, length - self.window + 1) // PAGE

    def slots(self, b: int, start: int, stop: int) -> Ints:
        """Return the slots (N) of tokens [start, stop) of row b, on the host."""
        slots_N = slots_of_pages(self.tables[b][start // PAGE : pages_for(stop)])
        return slots_N[start % PAGE : start % PAGE + stop - start]

    def first_kept_page(self, committed: int) -> int:
        """Return the first page that is kept of a row of `committed` tokens."""
        return self.first_needed_page(max(0, committed - SLACK))

    def _extend(self, b: int, stop: int) -> None:
        table = self.tables[b]
        for i in range(len(table), pages_for(stop)):
            table.append(self.allocator.allocate_next(table[-1] if table else None))
            self.pages_BP[b, i] = table[i]


class PagePool:
    """Pages of a model's KV memory by row, and the committed length of each row.

    `new_rows` gives other rows of the same memory: all rows share one allocator.

    Slots below `lengths_B` hold exact, committed values and are written once. Slots at or beyond it are working space
    of the view that runs. Page 0 is scratch: padding is written there, and no result depends on what is read from it.

    unit: tokens that views select together at least (see `kernel_api.PageTable`). int8: lower views read int8 copies of
    committed KV, or only the upper 4 bits of each number where KV is int8 itself. min_pass_shape: the shape to which
    passes of the full view are padded (see `ForwardBatch`). layout: where offloaded pages lie, and how much of them
    stays in memory; None: KV is not offloaded. eagle_memory: KV and states of an EAGLE head, in the same pages.
    windows: pages of the layers with a window; without it all layers share the same pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        pages: int,
        dtype: DType,
        device: str = "cpu",
        unit: int = PAGE,
        int8: bool = False,
        min_pass_shape: tuple[int, int] = (1, 1),
        layout: OffloadLayout | None = None,
        eagle_memory: EagleHeadMemory | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        self.config = config
        self.unit = unit
        self.min_pass_shape = min_pass_shape
        self.dtype = kv_dtype(config, dtype)
        """Type of the rows that the memory reads and writes."""
        self.eagle_memory = eagle_memory
        window_pages = windows.allocator.pages if windows else 0
        self.offloaded = dispatch.offloaded(config, pages, dtype, device, layout, window_pages) if layout else None
        self.kv = self.offloaded or dispatch.memory(config, pages, dtype, device, unit, int8, window_pages)
        self.xp = self.kv.xp
        self.device = self.kv.device
        self.array = self.kv.array
        self.allocator = PageAllocator(pages)
        self.windows = windows
        self.uses_window_pages = [bool(window and windows) for window in config.windows]
        """For each layer, whether its pages are those of `windows`."""
        self.has_window_layers = any(config.windows)
        """Whether some layers see a window, with or without window pages of their own."""
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        self.windows = self.windows and self.windows.new_rows(rows)
        self.lengths_B = np.zeros(rows, dtype=np.int64)
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.pages_BP = self.array(np.zeros((rows, 0), np.int32))
        """The tables as an array. Shorter rows are padded with the scratch page."""
        self._slots: list[Array] = [self.array(np.zeros(0, np.int64)) for _ in range(rows)]
        self._first_slot: list[int | None] = [None] * rows  # of rows whose pages are consecutive

    def new_rows(self, rows: int) -> PagePool:
        """Return `rows` empty rows of the same memory."""
        new_pool = copy(self)
        new_pool._set_rows(rows)
        return new_pool

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was, and release all other rows."""
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
        """Append the rows of `other`, a pool of the same memory."""
        if self.windows and other.windows:
            self.windows.join(other.windows)
        self.lengths_B = np.concatenate((self.lengths_B, other.lengths_B))
        self.tables += other.tables
        self._slots += other._slots
        self._first_slot += other._first_slot
        self._tabulate()

    @property
    def bytes(self) -> KVMemoryUsage:
        """Bytes of K and V of all rows, by where they lie."""
        if self.offloaded:
            return self.offloaded.bytes
        eagle_bytes = self.eagle_memory.bytes if self.eagle_memory else 0
        allocators = (self.allocator, self.windows.allocator if self.windows else self.allocator)
        tokens = sum((allocators[in_window].pages + 1) * PAGE for in_window in self.uses_window_pages)
        return KVMemoryUsage(self.token_bytes // self.config.layers * tokens + eagle_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V."""
        return self.config.kv_bytes(itemsize(self.dtype))

    @property
    def kv_dtype(self) -> str:
        """Name of the type of keys and values."""
        return self.dtype

    @property
    def free_pages(self) -> int:
        return len(self.allocator.free)

    @property
    def layerwise_prefill(self) -> bool:
        """Whether prompts are read layer by layer, so that each offloaded page leaves memory once.

        Windows move with the tokens, so a pool with windows reads all layers of a part before the next part.
        """
        return self.offloaded is not None and not self.windows

    def reserve(self, b: int, tokens: int) -> None:
        """Give row b the pages for `tokens` tokens in all: consecutive ones if there are such.

        Raises CacheError, and changes nothing, when too few pages are free or the backing store has no room for them.
        """
        missing_pages = max(pages_for(tokens) - len(self.tables[b]), 0)
        if missing_pages > self.free_pages:
            raise CacheError(
                f"the KV pool has {self.free_pages} free pages of {PAGE} tokens, and this row needs {missing_pages}. "
                "Use a shorter prompt, a smaller max_tokens or fewer rows at once"
            )
        if self.windows:
            self.windows.reserve(b, tokens)
        if not missing_pages:
            return
        run = self.allocator.find_free(missing_pages, previous_page=self.tables[b][-1] if self.tables[b] else None)
        if self.offloaded:
            self.offloaded.reserve(run)
        self.allocator.allocate(run)
        self._set_table(b, self.tables[b] + run)

    def release(self, b: int) -> None:
        """Drop the pages of row b, which holds no tokens from now on."""
        self.decref(self.tables[b])
        if self.windows:
            self.windows.release(b)
        self._set_table(b, [])
        self.lengths_B[b] = 0

    def attach_prefix(self, b: int, prefix: PrefixPages) -> None:
        """Start empty row b with shared pages. All of their tokens are committed."""
        self.allocator.incref(prefix.pages)
        if self.windows:
            self.windows.attach_prefix(b, prefix.window_pages)
        self._set_table(b, list(prefix.pages))
        self.lengths_B[b] = len(prefix.pages) * PAGE

    def incref(self, pages: Sequence[int], window_pages: Sequence[int] = ()) -> None:
        """Add one reference to each of these pages; `window_pages` may hold 0 for pages that are not there."""
        self.allocator.incref(pages)
        if self.windows:
            self.windows.allocator.incref([page for page in window_pages if page])

    def decref(self, pages: Sequence[int], window_pages: Sequence[int] = ()) -> None:
        """Drop one reference of each of these pages. Pages at zero become free."""
        free = self.allocator.decref(pages)
        if self.offloaded and free:
            self.offloaded.forget(free)
        if self.windows:
            self.windows.allocator.decref([page for page in window_pages if page])

    def prepare_pass(self, rows: range, stops: Sequence[int]) -> None:
        """Prepare the window pages of rows for passes that write tokens up to `stops`; see `WindowPages`."""
        if self.windows:
            for b, stop in zip(rows, stops, strict=True):
                self.windows.prepare_pass(b, int(self.lengths_B[b]), stop)

    def layers(self, windows: bool) -> list[int]:
        """Return the layers with pages in `windows`, or with `windows=False` all others."""
        return [layer for layer, in_window in enumerate(self.uses_window_pages) if in_window == windows]

    def first_cached_token(self, layer: int, b: int) -> int:
        """Return the first token of row b that a layer still holds."""
        return self.windows.first_pages[b] * PAGE if self.windows and self.uses_window_pages[layer] else 0

    def slots(self, b: int, start: int, stop: int, layer: int | None = None) -> Array:
        """Return the slots (N) of tokens [start, stop) of row b in a layer; None: in layers without a window."""
        if self.windows and layer is not None and self.uses_window_pages[layer]:
            return self.array(self.windows.slots(b, start, stop))
        return self._slots[b][start:stop]

    def units(self, rows: range, unit: int, windows: bool = False) -> Array:
        """Return all tokens of `rows` as units of a page list: int32 (B, U). windows: of layers with a window."""
        all_BP = self.array(self.windows.pages_BP) if self.windows and windows else self.pages_BP
        pages_BP = all_BP[rows.start : rows.stop]
        if unit == PAGE:
            return pages_BP
        parts = self.xp.arange(PAGE // unit, dtype=self.xp.int32, device=self.device)
        return (pages_BP[..., None] * (PAGE // unit) + parts).reshape(len(pages_BP), -1)

    def span(self, layer: int, b: int, start: int, stop: int) -> tuple[Array, Array]:
        """Return K and V of tokens [start, stop) of row b, each (G, N, D); a view of the memory where possible."""
        first_slot = self._first_slot[b]
        if first_slot is None or self.uses_window_pages[layer]:
            return self.kv.read(layer, self.slots(b, start, stop, layer))
        return self.kv.view(layer, first_slot + start, stop - start)

    def write(self, b: int, length: int, layers: Iterable[KeysValues], start: int = 0) -> None:
        """Fill an empty row with `length` tokens, bit for bit. layers: K and V of each layer's last tokens, (G, N, D).

        start: first token that `layers` holds for layers with a window; for other layers it holds all tokens.
        """
        if self.windows:
            self.windows.allocate_row(b, start, length)
        for layer, (keys_GND, values_GND) in enumerate(layers):
            slots_N = self.slots(b, self.first_cached_token(layer, b), length, layer)
            tail = slice(keys_GND.shape[1] - len(slots_N), None)
            self.kv.write(layer, slots_N, keys_GND[:, tail], values_GND[:, tail])
        self.lengths_B[b] = length

    def _set_table(self, b: int, table: list[int]) -> None:
        self.tables[b] = table
        self._tabulate()
        self._slots[b] = self.array(slots_of_pages(table))
        consecutive = bool(table) and table == list(range(table[0], table[0] + len(table)))
        self._first_slot[b] = table[0] * PAGE if consecutive else None

    def _tabulate(self) -> None:
        width = max(map(len, self.tables), default=0)
        self.pages_BP = self.array(padded_tables(self.tables, width))
        if self.windows:
            self.windows.tabulate(width)


class WindowSnapshot:
    """References to the window pages of a row. The pool evicts these pages when rows need them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[int, int] = {}
        """Pages by their index in the row. The pool evicts some where rows need pages."""
        self._length = 0

    def take(self, b: int) -> None:
        """Reference the windows of row b as it is now, instead of the windows referenced before."""
        if windows := self._pool.windows:
            windows.allocator.drop_evictable(self._pages)
            self._length = int(self._pool.lengths_B[b])
            self._pages |= {i: windows.tables[b][i] for i in range(windows.first_pages[b], pages_for(self._length))}
            windows.allocator.incref(list(self._pages.values()))
            windows.allocator.add_evictable(self._pages)

    def restore(self, b: int, length: int) -> None:
        """Give row b the windows that a rewind to `length` tokens needs, if the row lacks them.

        The row is unchanged if the snapshot lacks them too.
        """
        windows = self._pool.windows
        if windows and not windows.holds(b, length) and length <= self._length:
            first_page = stop = pages_for(length)
            while first_page - 1 in self._pages:
                first_page -= 1
            if first_page <= windows.first_needed_page(length):
                windows.clear(b)
                windows.attach_prefix(b, [0] * first_page + [self._pages[i] for i in range(first_page, stop)])
                windows.tabulate(self._pool.pages_BP.shape[1])
        self._length = min(self._length, length)  # the row may write to pages after `length`
