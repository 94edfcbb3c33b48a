"""One pool of KV pages per model. Lengths move, data does not.

Shape suffixes: B rows, P pages of a row, N tokens, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE, KeysValues, pages_for
from triforce.backends.kv_rows import kv_dtype, kv_name
from triforce.backends.offload_layout import OffloadLayout
from triforce.errors import CacheError
from triforce.interface.outputs import KVMemoryUsage
from triforce.kvcache.feature_memory import FeatureMemory
from triforce.kvcache.page_owners import PageOwners, PrefixPages
from triforce.kvcache.window_pages import WindowPages
from triforce.model.config import ModelConfig


class PagePool:
    """Pages of a model's KV memory by row, and how much of them is committed.

    `more` gives other rows of the same memory: pages are taken from, and given back to, one store.

    Slots below `lengths_B` hold exact, committed values and are written once; slots at or beyond it are working space
    of whichever view runs. Page 0 is scratch: padding is written there and nothing counts that is read from it.

    `unit`: tokens that views pick together at least (see `backends.PageTable`). `int8`: lower views read int8 copies
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
        self.config, self.device, self.unit, self.least = config, torch.device(device), unit, least
        self.dtype = kv_dtype(config, dtype)
        """Of the rows that its memory reads and writes."""
        self.features = features
        window_pages = windows.store.pages if windows else 0
        self.offloaded = dispatch.offloaded(config, pages, dtype, device, room, window_pages) if room else None
        self.kv = self.offloaded or dispatch.memory(config, pages, dtype, device, unit, int8, window_pages)
        self.store, self.windows = PageOwners(pages), windows
        self.apart = [bool(window and windows) for window in config.windows]
        """Of each layer whether its pages are those of `windows`."""
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
