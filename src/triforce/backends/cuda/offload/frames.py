"""Frames of offloaded KV pages on the device: each layer has some for pages that are being written, and a working set.

The former are the same for all KV heads (seats), and given by the host. Behind them are frames for pages of single KV
heads that were looked at last: choosing and finding those waits for no host. Frame 0 is scratch: what has no frame is
"there".

Shape suffixes as in kernel_api.py; L layers, P pages, S frames behind the seats, N pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cuda.triton.kv_tiles import carry
from triforce.backends.kernel_api import PAGE, KeysValues, OffloadLayout
from triforce.backends.torch.kv import allocate
from triforce.errors import CacheError, argument
from triforce.model.config import ModelConfig


class WriteSlots:
    """Seats 1 to `count` for pages 1 to `pages`, each in all layers alike.

    A page is `dirty` from when it is written until the store has it as it is; others lose their seat when it is wanted.
    """

    def __init__(self, pages: int, count: int) -> None:
        self.write_slot_P = np.zeros(pages + 1, np.int64)
        self.stored_P = np.zeros(pages + 1, np.bool_)
        self._dirty: set[int] = set()
        self._free = list(range(count, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        """Pages that have seats, as they were last written."""

    def mark_full_stored(self, table: Sequence[int], length: int) -> list[int]:
        """The fresh pages of a row that are full of committed tokens: they are stored from now on."""
        full_pages = []
        index = length // PAGE
        while index and table[index - 1] in self._dirty:
            index -= 1
            full_pages.append(table[index])
        self.store(full_pages)
        return full_pages

    def dirty(self, pages: Iterable[int]) -> list[int]:
        """Return those of some pages that the store does not hold as they are."""
        return [page for page in pages if page in self._dirty]

    @property
    def filled_pages(self) -> list[int]:
        """All pages that hold something, ascending."""
        return (self.stored_P | (self.write_slot_P > 0)).nonzero()[0].tolist()

    def store(self, pages: Sequence[int]) -> None:
        """The store has them as they are."""
        self._dirty.difference_update(pages)
        self.stored_P[list(pages)] = True

    def to_evict(self, pages: Sequence[int]) -> list[int]:
        """Return the pages that must `leave` so that these can be written. Raises CacheError if that is not enough.

        Those that have not been written to for longest; of what the store has not as it is, the less the better.
        """
        missing_slots = sum(not self.write_slot_P[page] for page in pages) - len(self._free)
        if missing_slots <= 0:
            return []
        evictable_pages = [page for page in self._lru if page not in set(pages)]
        if len(evictable_pages) < missing_slots:
            raise CacheError(
                f"too many texts are being written at once for {argument('kv_memory')}; give more, or fewer texts"
            )
        return sorted(evictable_pages, key=self._dirty.__contains__)[:missing_slots]

    def write(self, pages: Sequence[int]) -> list[int]:
        """Seat pages that are about to be written; return those that had no seat."""
        new = [page for page in pages if not self.write_slot_P[page]]
        for page in pages:
            self.write_slot_P[page] = self.write_slot_P[page] or self._free.pop()
            self._lru[page] = None
            self._lru.move_to_end(page)
        self._dirty.update(pages)
        return new

    def leave(self, pages: Iterable[int]) -> None:
        """Take the seats of these pages."""
        for page in pages:
            if write_slot := int(self.write_slot_P[page]):
                self._free.append(write_slot)
                self.write_slot_P[page] = 0
                del self._lru[page]
            self._dirty.discard(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Forget what these pages hold."""
        self.leave(pages)
        self.stored_P[list(pages)] = False


class WorkingSet:
    def __init__(
        self, layers: int, heads: int, pages: int, write_slot_count: int, frames: int, device: torch.device
    ) -> None:
        self._write_slot_count = write_slot_count
        self.frames_LGP = torch.zeros(layers, heads, pages + 1, dtype=torch.int32, device=device)
        """Of each page; 0: none."""
        # Column 0 is nobody's: what need not be noted is noted there.
        self._pages_LGS = torch.zeros(layers, heads, frames + 1, dtype=torch.int64, device=device)
        self._wanted_LGS = torch.zeros_like(self._pages_LGS)
        self._now = torch.zeros((), dtype=torch.int64, device=device)

    def assign(self, pages_N: Tensor, write_slots_N: Tensor) -> None:
        """Give these pages these seats and no other frames; 0: none at all."""
        self.frames_LGP[:, :, pages_N] = write_slots_N.int()

    def clear(self, layer: int) -> None:
        """The frames of a layer behind its seats hold nothing any more."""
        self.frames_LGP[layer].masked_fill_(self.frames_LGP[layer] > self._write_slot_count, 0)
        self._pages_LGS[layer] = self._wanted_LGS[layer] = 0

    def take(self, layers: slice, pages_LGN: Tensor) -> tuple[Tensor, Tensor]:
        """Give frames to pages of some layers (0: nothing wanted), at most as many as there are behind the seats.

        Those that were wanted longest ago go. Returns pages and frames (L, G, N) of what must be carried there, 0 where
        there is nothing to do.
        """
        frames_LGP, pages_LGS, used_LGS = (x[layers] for x in (self.frames_LGP, self._pages_LGS, self._wanted_LGS))
        self._now += 1
        frames_LGN = frames_LGP.gather(2, pages_LGN).long()
        used_LGS.scatter_(2, (frames_LGN - self._write_slot_count).clamp_min(0), self._now.expand(frames_LGN.shape))
        new_LGN = (pages_LGN > 0) & (frames_LGN == 0)
        oldest_LGS = used_LGS[..., 1:].argsort(2) + 1
        rank_LGN = (new_LGN.cumsum(2) - 1).clamp(0, oldest_LGS.shape[2] - 1)
        at_LGN = oldest_LGS.gather(2, rank_LGN) * new_LGN
        new_pages_LGN = pages_LGN * new_LGN
        evicted_LGN = pages_LGS.gather(2, at_LGN)
        # A page may have been forgotten since, or have another frame now.
        evicted_LGN = evicted_LGN * (frames_LGP.gather(2, evicted_LGN) == at_LGN + self._write_slot_count)
        to_LGN = (at_LGN + self._write_slot_count) * new_LGN
        frames_LGP.scatter_(2, evicted_LGN, 0)
        frames_LGP.scatter_(2, new_pages_LGN, to_LGN.int())
        pages_LGS.scatter_(2, at_LGN, new_pages_LGN)
        used_LGS.scatter_(2, at_LGN, self._now.expand(at_LGN.shape))
        return new_pages_LGN, to_LGN


Copies = Iterable[tuple[Tensor, Tensor]]
"""Each from the second to the first, contiguous and alike."""
Event = torch.cuda.Event | None
"""A point that the computation or the copy stream comes to."""


class CopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, copies: Copies) -> None:
        """Behind the stream's earlier copies, and what it waits for."""
        queue: AbstractContextManager[object] = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with queue:
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def record_copy(self) -> Event:
        """All that the stream has been asked for so far."""
        return self._stream.record_event() if self._stream else None

    def record_compute(self) -> Event:
        """All that has been computed so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    def copy_after(self, event: Event) -> None:
        """Let later copies wait for this event."""
        if self._stream and event:
            self._stream.wait_event(event)

    def compute_after(self, event: Event) -> None:
        """Let later computation wait for this event."""
        if event:
            torch.cuda.current_stream(self._device).wait_event(event)


class Buffers:
    """Places that layers take in turns: while one is computed with, the next one is filled.

    Each use is `fill`, `use`, `leave`, in this order; no more places than there are may be between the first and the
    last.
    """

    def __init__(self, stream: CopyStream, places: Sequence[int]) -> None:
        self._stream = stream
        self._ready: dict[int, Event] = dict.fromkeys(places)
        self._free: dict[int, Event] = dict.fromkeys(places)

    def fill(self, copies: Callable[[int], Copies]) -> int:
        """Take the place that was filled longest ago and fill it anew, once it is free; returns it."""
        place = next(iter(self._free))
        self._stream.copy_after(self._free.pop(place))
        self._stream.copy(copies(place))
        self._ready[place] = self._stream.record_copy()
        self._free[place] = None
        return place

    def use(self, place: int) -> None:
        """Let later computation see the buffer filled."""
        self._stream.compute_after(self._ready[place])

    def leave(self, place: int, copies: Copies = ()) -> None:
        """Free the buffer when all work so far is done, and these copies from it."""
        event = self._stream.record_compute()
        if copies := list(copies):
            self._stream.copy_after(event)
            self._stream.copy(copies)
            event = self._stream.record_copy()
        self._free[place] = event


Run = tuple[int, int]
"""Consecutive pages: the first, and how many."""


class DeviceLayout:
    def __init__(self, config: ModelConfig, pages: int, offload_layout: OffloadLayout, homes: KeysValues) -> None:
        """`homes`: (room.layers + room.buffers, G, S, D) each."""
        self._homes = homes
        self._pages = pages + 1
        self._size = PAGE * config.row_size
        G = config.kv_heads
        D = config.row_size
        keys = homes[0]
        self.home = {layer: layer for layer in range(offload_layout.layers)}
        """Of each whole layer."""
        self.part = {layer: layer - offload_layout.layers for layer in range(offload_layout.layers, config.layers)}
        """Of each other one, in the store, too."""
        assert offload_layout.store.memory is not None, "a store that a device reads is memory"
        self.store = offload_layout.store.memory.view(keys.dtype).view(len(self.part), 2, G, self._pages * PAGE, D)
        self.write_slot_count, parts = offload_layout.moving // G, max(1, len(self.part))
        self._frames = (offload_layout.frames // G - offload_layout.layers * self._pages) // parts
        self.frames = max(1, self._frames - 1 - self.write_slot_count)
        """Of the working set of each layer and KV head."""
        shape = (len(self.part), G, self._frames * PAGE, D)
        parts_k, parts_v = (allocate(shape, keys.dtype, keys.device).zero_() for _ in range(2))
        self.parts = parts_k, parts_v
        self._heads_G1 = torch.arange(G, device=keys.device)[:, None]
        self._locate()

    def on_device(self, layer: int) -> KeysValues:
        """A layer's home, or its part: (G, S, D) each."""
        if layer in self.home:
            return self.of_home(self.home[layer])
        return self.parts[0][self.part[layer]], self.parts[1][self.part[layer]]

    def of_home(self, home: int) -> KeysValues:
        return self._homes[0][home], self._homes[1][home]

    def at_pages(self, pages: Tensor) -> Tensor:
        """Pages (..., N), or (..., G, N) if each head has its own, as places of a layer in the store or of a home."""
        return self._heads_G1 * self._pages + pages

    def at_frames(self, frames: Tensor) -> Tensor:
        """Return frames as places of a part, in their shape; 0 where the frame is."""
        return (self._heads_G1 * self._frames + frames) * (frames > 0)

    def _locate(self) -> None:
        """Note which layers have parts, and where these and their pages in the store begin; 0 of whole layers."""
        layers = range(len(self.home) + len(self.part))
        device = self._heads_G1.device
        self.has_part_L = torch.tensor([layer in self.part for layer in layers], device=device)
        parts_L = torch.tensor([self.part.get(layer, 0) for layer in layers], device=device)
        heads_L11 = parts_L[:, None, None] * len(self._heads_G1)
        self._in_store_L11 = 2 * heads_L11 * self._pages
        self._in_parts_L11 = heads_L11 * self._frames

    def fetch(self, layers: slice, pages_LGN: Tensor, frames_LGN: Tensor) -> None:
        """Copy pages of single KV heads from the store to frames of parts; nothing where a frame is 0."""
        from_LGN = self.at_pages(pages_LGN) + self._in_store_L11[layers]
        to_LGN = (self.at_frames(frames_LGN) + self._in_parts_L11[layers]) * (frames_LGN > 0)
        carry((self.store[0, 0], self.store[0, 1]), from_LGN.flatten(), self.parts, to_LGN.flatten(), self._size)

    def from_part(self, layer: int, home: int, frames_X: Tensor, pages_X: Tensor) -> None:
        carry(self.on_device(layer), frames_X, self.of_home(home), pages_X, self._size)

    def to_part(self, layer: int, home: int, frames_X: Tensor, pages_X: Tensor) -> None:
        carry(self.of_home(home), pages_X, self.on_device(layer), frames_X, self._size)

    def to_store(self, layers: Collection[int], frames_X: Tensor, pages_X: Tensor) -> None:
        """Copy from the frames of layers that are not whole."""
        for layer in layers:
            carry(self.on_device(layer), frames_X, self.of_store(layer), pages_X, self._size)

    def to_parts(self, layers: Collection[int], frames_X: Tensor, pages_X: Tensor) -> None:
        """Copy to the frames of layers that are not whole."""
        for layer in layers:
            carry(self.of_store(layer), pages_X, self.on_device(layer), frames_X, self._size)

    def copies_in(self, layer: int, runs: Sequence[Run], home: int) -> Copies:
        """Runs of pages from the store to a home."""
        return ((at_home, stored) for stored, at_home in self.copies_out(layer, runs, home))

    def copies_out(self, layer: int, runs: Sequence[Run], home: int) -> Copies:
        """Runs of pages from a home to the store: each head's keys and values, run by run."""
        for stored_GSD, home_GSD in zip(self.of_store(layer), self.of_home(home), strict=True):
            for stored_SD, home_SD in zip(stored_GSD, home_GSD, strict=True):
                for first_page, count in runs:
                    slots = slice(first_page * PAGE, (first_page + count) * PAGE)
                    yield stored_SD[slots], home_SD[slots]

    def exchange(self, evicted_layer: int, admitted_layer: int, buffer: int, runs: Sequence[Run]) -> None:
        """The layer `evicted_layer` takes the place of the layer `admitted_layer`, whose pages a buffer has, and the other way round."""
        home = self.home[evicted_layer]
        for stored, at_home in self.copies_out(admitted_layer, runs, home):
            stored.copy_(at_home, non_blocking=True)
        for home_GSD, buffer_GSD in zip(self.of_home(home), self.of_home(buffer), strict=True):
            home_GSD.copy_(buffer_GSD)
        self.home[admitted_layer], self.part[evicted_layer] = (
            self.home.pop(evicted_layer),
            self.part.pop(admitted_layer),
        )
        self._locate()

    def of_store(self, layer: int) -> KeysValues:
        """All of a layer that is not whole, (G, S, D) each, on the host."""
        return self.store[self.part[layer], 0], self.store[self.part[layer], 1]


def runs_of(pages: Sequence[int]) -> list[Run]:
    """Ascending pages as runs."""
    runs: list[Run] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return runs
