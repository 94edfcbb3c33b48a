"""Residency of offloaded KV pages between host memory and the device: eviction, admission, lookup.

Pages that are being written have write slots. Pages full of committed tokens are stored; their slots are reused when
other pages need them. Shape suffixes as in kernel_api.py; N pages, X places of pages of all KV heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce.arrays import Array, is_gpu, on_device
from triforce.backends.cuda.kv_pages import read_rows, write_rows
from triforce.backends.cuda.offload.frames import Buffers, CopyStream, DeviceLayout, WorkingSet, WriteSlots, runs_of
from triforce.backends.kernel_api import PAGE, KeysValues, OffloadLayout
from triforce.backends.torch.tensors import as_tensor
from triforce.model.config import ModelConfig
from triforce.ragged import ints


class OffloadManager:
    """Manager of write slots, working set, buffers and store. layer_memories: as in `DeviceLayout`."""

    def __init__(
        self, config: ModelConfig, pages: int, offload_layout: OffloadLayout, layer_memories: KeysValues
    ) -> None:
        self.device = str(layer_memories[0].device)
        self.layout = DeviceLayout(config, pages, offload_layout, layer_memories)
        self.write_slots = WriteSlots(pages, self.layout.write_slot_count)
        sizes = self.layout.write_slot_count, self.layout.frames
        self.working = WorkingSet(config.layers, config.kv_heads, pages, *sizes, self.device)
        self.stream = CopyStream(self.device)
        self.buffers = Buffers(
            self.stream, range(offload_layout.resident_layers, offload_layout.resident_layers + offload_layout.buffers)
        )
        self.fetched = torch.zeros((), dtype=torch.int64, device=self.device)
        """Pages of single KV heads that were copied from the store on lookup."""

    def places_of(self, pages: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the write slots of pages as places of frames, and the pages as places of a layer memory."""
        pages_N, write_slots_N = self._with_write_slots([*pages])
        return self.layout.at_frames(write_slots_N).flatten(), self.layout.at_pages(pages_N).flatten()

    def store(self, pages: Sequence[int]) -> None:
        """Copy pages with write slots to the store."""
        if pages:
            self.layout.frames_to_store(self.layout.cached_index, *self.places_of(pages))
            self.write_slots.mark_stored(pages)

    def begin_write(self, pages: Sequence[int]) -> None:
        """Assign write slots to pages, for a pass that appends to them. Raises CacheError."""
        evicted_pages = self.write_slots.to_evict(pages)
        self.store(self.write_slots.dirty(evicted_pages))
        self.write_slots.release(evicted_pages)
        new_pages = self.write_slots.write(pages)
        if new_pages or evicted_pages:
            self._publish_write_slots([*evicted_pages, *new_pages])
        # A rewound sequence continues in stored pages.
        if rewritten_pages := [page for page in new_pages if self.write_slots.stored_P[page]]:
            self.layout.store_to_frames(self.layout.cached_index, *self.places_of(rewritten_pages))

    def drop(self, pages: Sequence[int]) -> None:
        """Drop the device's copies of pages."""
        self.write_slots.release(pages)
        self._publish_write_slots(pages)

    def _publish_write_slots(self, pages: Sequence[int]) -> None:
        self.working.assign(*self._with_write_slots(pages))

    def _with_write_slots(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return pages and their write slots, on the device."""
        pages_N = ints([*pages])
        return on_device(pages_N, self.device), on_device(self.write_slots.write_slot_P[pages_N], self.device)

    def find(self, layers: slice, needed_LGN: Tensor) -> None:
        """Bring pages of single KV heads into frames of `layers`. Page 0 stands for no page, as in resident layers."""
        pages_LGN, frames_LGN = self.working.take(layers, needed_LGN)
        self.fetched += (pages_LGN > 0).sum()
        self.layout.fetch(layers, pages_LGN, frames_LGN)

    def keep(self, layer: int, buffer: int, needed_GN: Tensor) -> None:
        """Bring pages of single KV heads into a layer's frames, from its buffer, which holds all pages."""
        pages_1GN, frames_1GN = self.working.take(slice(layer, layer + 1), needed_GN[None])
        layout = self.layout
        layout.buffer_to_frames(
            layer, buffer, layout.at_frames(frames_1GN).flatten(), layout.at_pages(pages_1GN).flatten()
        )

    def write(self, layer: int, slots_N: Tensor, k_GND: Array, v_GND: Array) -> None:
        slots_N = slots_N.cpu()
        pages = _pages_of(slots_N)
        self.store(self.write_slots.dirty(pages))  # the slots may cover only a part of a page
        self.drop(pages)
        self.write_slots.stored_P[pages] = True
        if layer in self.layout.cached_index:
            self.synchronize()
        for to_GSD, new_GND in zip(self._all_of(layer), (k_GND, v_GND), strict=True):
            write_rows(to_GSD, slots_N.to(to_GSD.device), as_tensor(new_GND).to(to_GSD.device, to_GSD.dtype))

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        slots_N = slots_N.cpu()
        dirty_pages = self.write_slots.dirty(_pages_of(slots_N))
        if layer in self.layout.cached_index:
            if dirty_pages:  # they stay dirty, as rows may still write to them
                self.layout.frames_to_store([layer], *self.places_of(dirty_pages))
            self.synchronize()
        keys_GSD, values_GSD = self._all_of(layer)
        slots_N = slots_N.to(keys_GSD.device)
        return read_rows(keys_GSD, slots_N).to(self.device), read_rows(values_GSD, slots_N).to(self.device)

    def _all_of(self, layer: int) -> KeysValues:
        """Return all pages of a layer: its layer memory, or its part of the store."""
        layout = self.layout
        return layout.on_device(layer) if layer in layout.resident_index else layout.of_store(layer)

    def synchronize(self) -> None:
        """Wait for the device, before the host reads or changes the store."""
        if is_gpu(self.device):
            torch.cuda.synchronize(self.device)

    def prefer(self, layers: Collection[int]) -> bool:
        """Make `layers` resident, as many as have room; return whether any layer has moved."""
        layout = self.layout
        admitted_layers = [layer for layer in sorted(layers) if layer not in layout.resident_index]
        evicted_layers = [layer for layer in reversed(layout.resident_index) if layer not in layers]
        runs = runs_of(self.write_slots.filled_pages)
        slotted_pages = self.write_slots.write_slot_P.nonzero()[0].tolist()
        for admitted_layer, evicted_layer in zip(admitted_layers, evicted_layers, strict=False):
            layout.frames_to_store([admitted_layer], *self.places_of(self.write_slots.dirty(slotted_pages)))
            self.stream.copy_after(self.stream.record_compute())
            buffer = self.buffers.fill(partial(layout.copies_in, admitted_layer, runs))
            self.buffers.use(buffer)
            layout.exchange(evicted_layer, admitted_layer, buffer, runs)
            self.buffers.release(buffer)
            layout.store_to_frames([evicted_layer], *self.places_of(slotted_pages))
            self.working.clear(admitted_layer)
        return bool(admitted_layers and evicted_layers)


def _pages_of(slots_N: Tensor) -> list[int]:
    """Return the distinct pages of slots on the host."""
    return [*map(int, np.unique(slots_N.numpy() // PAGE))]
