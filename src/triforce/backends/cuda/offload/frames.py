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
        left = []
        last = length // PAGE
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
        return (self.stored_P | (self.seat_P > 0)).nonzero()[0].tolist()

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
            raise CacheError(
                f"too many texts are being written at once for {argument('kv_memory')}; give more, or fewer texts"
            )
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


class WorkingSet:
    def __init__(self, layers: int, heads: int, pages: int, seats: int, frames: int, device: torch.device) -> None:
        self._seats = seats
        self.frames_LGP = torch.zeros(layers, heads, pages + 1, dtype=torch.int32, device=device)
        """Of each page; 0: none."""
        # Column 0 is nobody's: what need not be noted is noted there.
        self._pages_LGS = torch.zeros(layers, heads, frames + 1, dtype=torch.int64, device=device)
        self._wanted_LGS = torch.zeros_like(self._pages_LGS)
        self._now = torch.zeros((), dtype=torch.int64, device=device)

    def seat(self, pages_N: Tensor, seats_N: Tensor) -> None:
        """Give these pages these seats and no other frames; 0: none at all."""
        self.frames_LGP[:, :, pages_N] = seats_N.int()

    def clear(self, layer: int) -> None:
        """The frames of a layer behind its seats hold nothing any more."""
        self.frames_LGP[layer].masked_fill_(self.frames_LGP[layer] > self._seats, 0)
        self._pages_LGS[layer] = self._wanted_LGS[layer] = 0

    def take(self, layers: slice, wanted_LGN: Tensor) -> tuple[Tensor, Tensor]:
        """Give frames to pages of some layers (0: nothing wanted), at most as many as there are behind the seats.

        Those that were wanted longest ago go. Returns pages and frames (L, G, N) of what must be carried there, 0 where
        there is nothing to do.
        """
        frames_LGP, pages_LGS, used_LGS = (x[layers] for x in (self.frames_LGP, self._pages_LGS, self._wanted_LGS))
        self._now += 1
        held_LGN = frames_LGP.gather(2, wanted_LGN).long()
        used_LGS.scatter_(2, (held_LGN - self._seats).clamp_min(0), self._now.expand(held_LGN.shape))
        new_LGN = (wanted_LGN > 0) & (held_LGN == 0)
        oldest_LGS = used_LGS[..., 1:].argsort(2) + 1
        turn_LGN = (new_LGN.cumsum(2) - 1).clamp(0, oldest_LGS.shape[2] - 1)
        at_LGN = oldest_LGS.gather(2, turn_LGN) * new_LGN
        new_pages_LGN = wanted_LGN * new_LGN
        gone_LGN = pages_LGS.gather(2, at_LGN)
        # A page may have been forgotten since, or have another frame now.
        gone_LGN = gone_LGN * (frames_LGP.gather(2, gone_LGN) == at_LGN + self._seats)
        to_LGN = (at_LGN + self._seats) * new_LGN
        frames_LGP.scatter_(2, gone_LGN, 0)
        frames_LGP.scatter_(2, new_pages_LGN, to_LGN.int())
        pages_LGS.scatter_(2, at_LGN, new_pages_LGN)
        used_LGS.scatter_(2, at_LGN, self._now.expand(at_LGN.shape))
        return new_pages_LGN, to_LGN


Copies = Iterable[tuple[Tensor, Tensor]]
"""Each from the second to the first, contiguous and alike."""
Mark = torch.cuda.Event | None
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

    def reached(self) -> Mark:
        """All that the stream has been asked for so far."""
        return self._stream.record_event() if self._stream else None

    def computed(self) -> Mark:
        """All that has been computed so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    def after(self, mark: Mark) -> None:
        """Let later copies wait for this event."""
        if self._stream and mark:
            self._stream.wait_event(mark)

    def hold(self, mark: Mark) -> None:
        """Let later computation wait for this event."""
        if mark:
            torch.cuda.current_stream(self._device).wait_event(mark)


class Buffers:
    """Places that layers take in turns: while one is computed with, the next one is filled.

    Each use is `fill`, `use`, `leave`, in this order; no more places than there are may be between the first and the
    last.
    """

    def __init__(self, stream: CopyStream, places: Sequence[int]) -> None:
        self._stream = stream
        self._ready: dict[int, Mark] = dict.fromkeys(places)
        self._free: dict[int, Mark] = dict.fromkeys(places)

    def fill(self, copies: Callable[[int], Copies]) -> int:
        """Take the place that was filled longest ago and fill it anew, once it is free; returns it."""
        place = next(iter(self._free))
        self._stream.after(self._free.pop(place))
        self._stream.copy(copies(place))
        self._ready[place] = self._stream.reached()
        self._free[place] = None
        return place

    def use(self, place: int) -> None:
        """Let later computation see the buffer filled."""
        self._stream.hold(self._ready[place])

    def leave(self, place: int, copies: Copies = ()) -> None:
        """Free the buffer when all work so far is done, and these copies from it."""
        mark = self._stream.computed()
        if copies := list(copies):
            self._stream.after(mark)
            self._stream.copy(copies)
            mark = self._stream.reached()
        self._free[place] = mark


Run = tuple[int, int]
"""Consecutive pages: the first, and how many."""


class DeviceLayout:
    def __init__(self, config: ModelConfig, pages: int, room: OffloadLayout, homes: KeysValues) -> None:
        """`homes`: (room.layers + room.buffers, G, S, D) each."""
        self._homes = homes
        self._pages = pages + 1
        self._size = PAGE * config.row_size
        G = config.kv_heads
        D = config.row_size
        keys = homes[0]
        self.home = {layer: layer for layer in range(room.layers)}
        """Of each whole layer."""
        self.part = {layer: layer - room.layers for layer in range(room.layers, config.layers)}
        """Of each other one, in the store, too."""
        assert room.store.memory is not None, "a store that a device reads is memory"
        self.store = room.store.memory.view(keys.dtype).view(len(self.part), 2, G, self._pages * PAGE, D)
        self.seats, parts = room.moving // G, max(1, len(self.part))
        self._frames = (room.frames // G - room.layers * self._pages) // parts
        self.frames = max(1, self._frames - 1 - self.seats)
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
        self.parted_L = torch.tensor([layer in self.part for layer in layers], device=device)
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
        return ((there, stored) for stored, there in self.copies_out(layer, runs, home))

    def copies_out(self, layer: int, runs: Sequence[Run], home: int) -> Copies:
        """Runs of pages from a home to the store: each head's keys and values, run by run."""
        for stored_GSD, there_GSD in zip(self.of_store(layer), self.of_home(home), strict=True):
            for stored_SD, there_SD in zip(stored_GSD, there_GSD, strict=True):
                for first, count in runs:
                    slots = slice(first * PAGE, (first + count) * PAGE)
                    yield stored_SD[slots], there_SD[slots]

    def exchange(self, whole: int, other: int, buffer: int, runs: Sequence[Run]) -> None:
        """The layer `whole` takes the place of the layer `other`, whose pages a buffer has, and the other way round."""
        home = self.home[whole]
        for stored, there in self.copies_out(other, runs, home):
            stored.copy_(there, non_blocking=True)
        for kept_GSD, here_GSD in zip(self.of_home(home), self.of_home(buffer), strict=True):
            kept_GSD.copy_(here_GSD)
        self.home[other], self.part[whole] = self.home.pop(whole), self.part.pop(other)
        self._locate()

    def of_store(self, layer: int) -> KeysValues:
        """All of a layer that is not whole, (G, S, D) each, on the host."""
        return self.store[self.part[layer], 0], self.store[self.part[layer], 1]


def runs_of(pages: Sequence[int]) -> list[Run]:
    """Ascending pages as runs."""
    found: list[Run] = []
    for page in pages:
        if found and page == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((page, 1))
    return found
