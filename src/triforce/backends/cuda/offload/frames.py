"""Frames of offloaded KV pages on the device: each layer has write slots, for pages being written, and a working set.

Write slots are frames that hold a page for all KV heads; the host assigns them. The other frames are the working set:
they hold the most recently read pages of single KV heads. The device assigns and looks them up without waiting for the
host. Frame 0 is scratch, and stands for pages without a frame.

Shape suffixes as in kernel_api.py; L layers, P pages, S frames of the working set, N pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from triforce.arrays import is_gpu
from triforce.backends.cuda.triton.kv_tiles import copy_pages
from triforce.backends.kernel_api import PAGE, KeysValues, OffloadLayout
from triforce.backends.torch.kv import allocate
from triforce.backends.torch.tensors import tensor_of
from triforce.errors import CacheError, argument
from triforce.model.config import ModelConfig


class WriteSlots:
    """Write slots 1 to `count` for pages 1 to `pages`, the same in all layers.

    A page is dirty from a write until the store holds the same contents. A clean page loses its slot to a page that
    needs one.
    """

    def __init__(self, pages: int, count: int) -> None:
        self.write_slot_P = np.zeros(pages + 1, np.int64)
        self.stored_P = np.zeros(pages + 1, np.bool_)
        self._dirty: set[int] = set()
        self._free = list(range(count, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        """Pages with write slots, least recently written first."""

    def mark_full_stored(self, table: Sequence[int], length: int) -> list[int]:
        """Mark a row's dirty pages that are full of committed tokens as stored; return them for the caller to store."""
        full_pages = []
        index = length // PAGE
        while index and table[index - 1] in self._dirty:
            index -= 1
            full_pages.append(table[index])
        self.mark_stored(full_pages)
        return full_pages

    def dirty(self, pages: Iterable[int]) -> list[int]:
        """Return the dirty pages among `pages`."""
        return [page for page in pages if page in self._dirty]

    @property
    def filled_pages(self) -> list[int]:
        """All pages with contents, ascending."""
        return (self.stored_P | (self.write_slot_P > 0)).nonzero()[0].tolist()

    def mark_stored(self, pages: Sequence[int]) -> None:
        """Mark pages as held by the store."""
        self._dirty.difference_update(pages)
        self.stored_P[list(pages)] = True

    def to_evict(self, pages: Sequence[int]) -> list[int]:
        """Return pages to release so that `pages` can be written. Raises CacheError if there are too few.

        Clean pages come before dirty ones, and among each the least recently written first.
        """
        missing_slots = sum(not self.write_slot_P[page] for page in pages) - len(self._free)
        if missing_slots <= 0:
            return []
        evictable_pages = [page for page in self._lru if page not in set(pages)]
        if len(evictable_pages) < missing_slots:
            raise CacheError(
                f"{argument('kv_memory')} cannot hold all sequences that are written at once; raise it, or run fewer"
            )
        return sorted(evictable_pages, key=self._dirty.__contains__)[:missing_slots]

    def write(self, pages: Sequence[int]) -> list[int]:
        """Assign write slots to pages that are about to be written; return the pages that had none."""
        unslotted_pages = [page for page in pages if not self.write_slot_P[page]]
        for page in pages:
            self.write_slot_P[page] = self.write_slot_P[page] or self._free.pop()
            self._lru[page] = None
            self._lru.move_to_end(page)
        self._dirty.update(pages)
        return unslotted_pages

    def release(self, pages: Iterable[int]) -> None:
        """Free the write slots of pages."""
        for page in pages:
            if write_slot := int(self.write_slot_P[page]):
                self._free.append(write_slot)
                self.write_slot_P[page] = 0
                del self._lru[page]
            self._dirty.discard(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Forget the contents of pages, on the device and in the store."""
        self.release(pages)
        self.stored_P[list(pages)] = False


class WorkingSet:
    """Frames of the most recently read pages, for each layer and KV head, assigned on the device.

    write_slot_count: frames of each layer before the working set. frames: frames of the working set of a layer and KV
    head.
    """

    def __init__(self, layers: int, heads: int, pages: int, write_slot_count: int, frames: int, device: str) -> None:
        self._write_slot_count = write_slot_count
        self.frames_LGP = torch.zeros(layers, heads, pages + 1, dtype=torch.int32, device=device)
        """Frame of each page; 0: none."""
        # Column 0 is scratch: updates that are not needed go there.
        self._pages_LGS = torch.zeros(layers, heads, frames + 1, dtype=torch.int64, device=device)
        self._used_LGS = torch.zeros_like(self._pages_LGS)
        self._clock = torch.zeros((), dtype=torch.int64, device=device)

    def assign(self, pages_N: Tensor, write_slots_N: Tensor) -> None:
        """Map pages to write slots in all layers, in place of other frames; slot 0 unmaps a page."""
        self.frames_LGP[:, :, pages_N] = write_slots_N.int()

    def clear(self, layer: int) -> None:
        """Empty a layer's frames of the working set."""
        self.frames_LGP[layer].masked_fill_(self.frames_LGP[layer] > self._write_slot_count, 0)
        self._pages_LGS[layer] = self._used_LGS[layer] = 0

    def take(self, layers: slice, pages_LGN: Tensor) -> tuple[Tensor, Tensor]:
        """Assign frames to pages of some layers (0: no page), at most as many as the working set has.

        The least recently used frames are reassigned. Returns pages (L, G, N) that must be copied, and their frames; 0
        where there is nothing to copy.
        """
        frames_LGP, pages_LGS, used_LGS = (x[layers] for x in (self.frames_LGP, self._pages_LGS, self._used_LGS))
        self._clock += 1
        frames_LGN = frames_LGP.gather(2, pages_LGN).long()
        used_LGS.scatter_(2, (frames_LGN - self._write_slot_count).clamp_min(0), self._clock.expand(frames_LGN.shape))
        new_LGN = (pages_LGN > 0) & (frames_LGN == 0)
        oldest_LGS = used_LGS[..., 1:].argsort(2) + 1
        rank_LGN = (new_LGN.cumsum(2) - 1).clamp(0, oldest_LGS.shape[2] - 1)
        at_LGN = oldest_LGS.gather(2, rank_LGN) * new_LGN
        new_pages_LGN = pages_LGN * new_LGN
        evicted_LGN = pages_LGS.gather(2, at_LGN)
        # An evicted page may have been forgotten, or moved to another frame.
        evicted_LGN = evicted_LGN * (frames_LGP.gather(2, evicted_LGN) == at_LGN + self._write_slot_count)
        to_LGN = (at_LGN + self._write_slot_count) * new_LGN
        frames_LGP.scatter_(2, evicted_LGN, 0)
        frames_LGP.scatter_(2, new_pages_LGN, to_LGN.int())
        pages_LGS.scatter_(2, at_LGN, new_pages_LGN)
        used_LGS.scatter_(2, at_LGN, self._clock.expand(at_LGN.shape))
        return new_pages_LGN, to_LGN


Copies = Iterable[tuple[Tensor, Tensor]]
"""Pairs of target and source, contiguous and of equal shape."""
Event = torch.cuda.Event | None
"""Point in the compute stream or the copy stream; None on a CPU, where nothing waits."""


class CopyStream:
    """CUDA stream for copies beside the compute stream. On a CPU copies are synchronous, and events are None."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_gpu(device) else None

    def copy(self, copies: Copies) -> None:
        """Queue copies after the stream's earlier copies, and the events that it waits for."""
        queue: AbstractContextManager[object] = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with queue:
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def record_copy(self) -> Event:
        """Record an event after all copies queued so far."""
        return self._stream.record_event() if self._stream else None

    def record_compute(self) -> Event:
        """Record an event after all computation queued so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    def copy_after(self, event: Event) -> None:
        """Let later copies wait for `event`."""
        if self._stream and event:
            self._stream.wait_event(event)

    def compute_after(self, event: Event) -> None:
        """Let later computation wait for `event`."""
        if event:
            torch.cuda.current_stream(self._device).wait_event(event)


class Buffers:
    """Buffers that layers use in turns: while one layer computes with its buffer, the next layer's buffer is filled.

    buffers: the index of each buffer. For a buffer a layer calls `fill`, `use`, `release`, in this order. At most
    `len(buffers)` layers may be between `fill` and `release`.
    """

    def __init__(self, stream: CopyStream, buffers: Sequence[int]) -> None:
        self._stream = stream
        self._ready: dict[int, Event] = dict.fromkeys(buffers)
        self._free: dict[int, Event] = dict.fromkeys(buffers)

    def fill(self, copies: Callable[[int], Copies]) -> int:
        """Fill the buffer that was filled longest ago, once it is free; return its index."""
        buffer = next(iter(self._free))
        self._stream.copy_after(self._free.pop(buffer))
        self._stream.copy(copies(buffer))
        self._ready[buffer] = self._stream.record_copy()
        self._free[buffer] = None
        return buffer

    def use(self, buffer: int) -> None:
        """Let later computation wait until the buffer is filled."""
        self._stream.compute_after(self._ready[buffer])

    def release(self, buffer: int, copies: Copies = ()) -> None:
        """Free the buffer after all computation so far, and after `copies` from it."""
        event = self._stream.record_compute()
        if copies := list(copies):
            self._stream.copy_after(event)
            self._stream.copy(copies)
            event = self._stream.record_copy()
        self._free[buffer] = event


Run = tuple[int, int]
"""Consecutive pages: the first page, and the count."""


class DeviceLayout:
    """Memory of pages on the device and in the store.

    A layer memory is device memory with room for all pages of one layer. Each resident layer owns a layer memory; the
    other layer memories are buffers. The pages of any other layer lie in the store. Such a cached layer also has frames
    on the device. A place is the index of a page or a frame in a memory, counted over the KV heads one after the other.
    """

    def __init__(
        self, config: ModelConfig, pages: int, offload_layout: OffloadLayout, layer_memories: KeysValues
    ) -> None:
        """layer_memories: keys and values of all layer memories, (resident layers + buffers, G, S, D) each."""
        self._layer_memories = layer_memories
        self._pages = pages + 1
        self._size = PAGE * config.row_size
        G = config.kv_heads
        D = config.row_size
        keys = layer_memories[0]
        self.resident_index = {layer: layer for layer in range(offload_layout.resident_layers)}
        """Index in `layer_memories` of each resident layer."""
        stored_layers = range(offload_layout.resident_layers, config.layers)
        self.cached_index = {layer: index for index, layer in enumerate(stored_layers)}
        """Index in `frame_memories`, and in the store, of each cached layer."""
        assert offload_layout.store.memory is not None, "a store that a device reads is memory"
        store_shape = (len(self.cached_index), 2, G, self._pages * PAGE, D)
        self.store = tensor_of(offload_layout.store.memory).view(keys.dtype).view(store_shape)
        self.write_slot_count = offload_layout.written_pages // G
        cached_layers = max(1, len(self.cached_index))
        self._frames = (offload_layout.frames // G - offload_layout.resident_layers * self._pages) // cached_layers
        self.frames = max(1, self._frames - 1 - self.write_slot_count)
        """Frames in the working set of each layer and KV head."""
        shape = (len(self.cached_index), G, self._frames * PAGE, D)
        frame_keys, frame_values = (allocate(shape, keys.dtype, keys.device).zero_() for _ in range(2))
        self.frame_memories = frame_keys, frame_values
        self._heads_G1 = torch.arange(G, device=keys.device)[:, None]
        self._locate()

    def on_device(self, layer: int) -> KeysValues:
        """Return a layer's own layer memory, or the memory of its frames: (G, S, D) each."""
        if layer in self.resident_index:
            return self.layer_memory(self.resident_index[layer])
        return self.frame_memories[0][self.cached_index[layer]], self.frame_memories[1][self.cached_index[layer]]

    def layer_memory(self, index: int) -> KeysValues:
        """Return the keys and values of one layer memory: (G, S, D) each."""
        return self._layer_memories[0][index], self._layer_memories[1][index]

    def at_pages(self, pages: Tensor) -> Tensor:
        """Return the places of pages in a layer memory, or in a layer's part of the store.

        pages: (..., N) for all KV heads, or (..., G, N) if each KV head has its own.
        """
        return self._heads_G1 * self._pages + pages

    def at_frames(self, frames: Tensor) -> Tensor:
        """Return the places of frames in the memory of a layer's frames, in their shape; 0 where a frame is 0."""
        return (self._heads_G1 * self._frames + frames) * (frames > 0)

    def _locate(self) -> None:
        """Update which layers are cached, and where their frames and their pages in the store begin; else 0."""
        layers = range(len(self.resident_index) + len(self.cached_index))
        device = self._heads_G1.device
        self.is_cached_L = torch.tensor([layer in self.cached_index for layer in layers], device=device)
        indices_L = torch.tensor([self.cached_index.get(layer, 0) for layer in layers], device=device)
        heads_L11 = indices_L[:, None, None] * len(self._heads_G1)
        self._in_store_L11 = 2 * heads_L11 * self._pages
        self._in_frames_L11 = heads_L11 * self._frames

    def fetch(self, layers: slice, pages_LGN: Tensor, frames_LGN: Tensor) -> None:
        """Copy pages of single KV heads from the store to frames of `layers`; no copy where a frame is 0."""
        from_LGN = self.at_pages(pages_LGN) + self._in_store_L11[layers]
        to_LGN = (self.at_frames(frames_LGN) + self._in_frames_L11[layers]) * (frames_LGN > 0)
        copy_pages(
            (self.store[0, 0], self.store[0, 1]), from_LGN.flatten(), self.frame_memories, to_LGN.flatten(), self._size
        )

    def frames_to_buffer(self, layer: int, buffer: int, frames_X: Tensor, pages_X: Tensor) -> None:
        """Copy frames of a cached layer to pages of a buffer."""
        copy_pages(self.on_device(layer), frames_X, self.layer_memory(buffer), pages_X, self._size)

    def buffer_to_frames(self, layer: int, buffer: int, frames_X: Tensor, pages_X: Tensor) -> None:
        """Copy pages of a buffer to frames of a cached layer."""
        copy_pages(self.layer_memory(buffer), pages_X, self.on_device(layer), frames_X, self._size)

    def frames_to_store(self, layers: Collection[int], frames_X: Tensor, pages_X: Tensor) -> None:
        """Copy frames of cached layers to their pages in the store."""
        for layer in layers:
            copy_pages(self.on_device(layer), frames_X, self.of_store(layer), pages_X, self._size)

    def store_to_frames(self, layers: Collection[int], frames_X: Tensor, pages_X: Tensor) -> None:
        """Copy pages of cached layers from the store to their frames."""
        for layer in layers:
            copy_pages(self.of_store(layer), pages_X, self.on_device(layer), frames_X, self._size)

    def copies_in(self, layer: int, runs: Sequence[Run], memory_index: int) -> Copies:
        """Return copies of runs of pages from the store to a layer memory."""
        return ((on_device, stored) for stored, on_device in self.copies_out(layer, runs, memory_index))

    def copies_out(self, layer: int, runs: Sequence[Run], memory_index: int) -> Copies:
        """Yield copies of runs of pages from a layer memory to the store: each head's keys and values, run by run."""
        for stored_GSD, memory_GSD in zip(self.of_store(layer), self.layer_memory(memory_index), strict=True):
            for stored_SD, memory_SD in zip(stored_GSD, memory_GSD, strict=True):
                for first_page, count in runs:
                    slots = slice(first_page * PAGE, (first_page + count) * PAGE)
                    yield stored_SD[slots], memory_SD[slots]

    def exchange(self, evicted_layer: int, admitted_layer: int, buffer: int, runs: Sequence[Run]) -> None:
        """Move `evicted_layer` from its layer memory to the store, and `admitted_layer` from `buffer` into that memory.

        The evicted layer takes over the admitted layer's part of the store and its frames.
        """
        memory_index = self.resident_index[evicted_layer]
        for stored, on_device in self.copies_out(admitted_layer, runs, memory_index):
            stored.copy_(on_device, non_blocking=True)
        for memory_GSD, buffer_GSD in zip(self.layer_memory(memory_index), self.layer_memory(buffer), strict=True):
            memory_GSD.copy_(buffer_GSD)
        self.resident_index[admitted_layer] = self.resident_index.pop(evicted_layer)
        self.cached_index[evicted_layer] = self.cached_index.pop(admitted_layer)
        self._locate()

    def of_store(self, layer: int) -> KeysValues:
        """Return all pages of a cached layer, on the host: (G, S, D) each."""
        return self.store[self.cached_index[layer], 0], self.store[self.cached_index[layer], 1]


def runs_of(pages: Sequence[int]) -> list[Run]:
    """Return ascending pages as runs."""
    runs: list[Run] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return runs
