"""Pages of offloaded KV in the host's memory, and what of them is on the device: who comes, who goes, who is found.

Pages that are being written have seats. Full of committed tokens they are stored, and then leave when their seats are
wanted. Shape suffixes as in kernel_api.py; N some pages, X places of pages of all KV heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cuda.kv_pages import read_rows, write_rows
from triforce.backends.cuda.offload.frames import Buffers, CopyStream, DeviceLayout, WorkingSet, WriteSlots, runs_of
from triforce.backends.kernel_api import PAGE, KeysValues, OffloadLayout
from triforce.model.config import ModelConfig
from triforce.ragged import ints, to_device


class OffloadManager:
    """`homes` are places on the device for layers of all pages, (room.layers + room.buffers, G, S, D) each."""

    def __init__(self, config: ModelConfig, pages: int, offload_layout: OffloadLayout, homes: KeysValues) -> None:
        self.device = homes[0].device
        self.layout = DeviceLayout(config, pages, offload_layout, homes)
        self.write_slots = WriteSlots(pages, self.layout.write_slot_count)
        sizes = self.layout.write_slot_count, self.layout.frames
        self.working = WorkingSet(config.layers, config.kv_heads, pages, *sizes, self.device)
        self.stream = CopyStream(self.device)
        self.buffers = Buffers(
            self.stream, range(offload_layout.layers, offload_layout.layers + offload_layout.buffers)
        )
        self.fetched = torch.zeros((), dtype=torch.int64, device=self.device)
        """Pages of single KV heads that were read because they were not there."""

    def places_of(self, pages: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The seats of some pages, as places of a part, and the pages themselves."""
        pages_N, write_slots_N = self._with_write_slots([*pages])
        return self.layout.at_frames(write_slots_N).flatten(), self.layout.at_pages(pages_N).flatten()

    def store(self, pages: Sequence[int]) -> None:
        """Pages with seats, as they are."""
        if pages:
            self.layout.to_store(self.layout.part, *self.places_of(pages))
            self.write_slots.store(pages)

    def begin_write(self, pages: Sequence[int]) -> None:
        """Make pages ready to be written, by what goes on where they end. Raises CacheError."""
        evicted_pages = self.write_slots.to_evict(pages)
        self.store(self.write_slots.dirty(evicted_pages))
        self.write_slots.leave(evicted_pages)
        new_pages = self.write_slots.write(pages)
        if new_pages or evicted_pages:
            self._publish_write_slots([*evicted_pages, *new_pages])
        if rewritten_pages := [page for page in new_pages if self.write_slots.stored_P[page]]:  # the text was cut
            self.layout.to_parts(self.layout.part, *self.places_of(rewritten_pages))

    def leave(self, pages: Sequence[int]) -> None:
        """Drop what the device has of these pages."""
        self.write_slots.leave(pages)
        self._publish_write_slots(pages)

    def _publish_write_slots(self, pages: Sequence[int]) -> None:
        self.working.assign(*self._with_write_slots(pages))

    def _with_write_slots(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Pages and their seats, on the device."""
        pages_N = ints([*pages])
        return to_device(pages_N, self.device), to_device(self.write_slots.write_slot_P[pages_N], self.device)

    def find(self, layers: slice, needed_LGN: Tensor) -> None:
        """See that pages of single KV heads have frames in these layers; 0 is none, as is a page of a whole layer."""
        pages_LGN, frames_LGN = self.working.take(layers, needed_LGN)
        self.fetched += (pages_LGN > 0).sum()
        self.layout.fetch(layers, pages_LGN, frames_LGN)

    def keep(self, layer: int, home: int, needed_GN: Tensor) -> None:
        """See that pages of single KV heads have frames; they come from the layer's home, where all are."""
        pages_1GN, frames_1GN = self.working.take(slice(layer, layer + 1), needed_GN[None])
        layout = self.layout
        layout.to_part(layer, home, layout.at_frames(frames_1GN).flatten(), layout.at_pages(pages_1GN).flatten())

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        slots_N = slots_N.cpu()
        pages = _pages_of(slots_N)
        self.store(self.write_slots.dirty(pages))  # the slots may be a part of what they hold
        self.leave(pages)
        self.write_slots.stored_P[pages] = True
        if layer in self.layout.part:
            self.synchronize()
        for to_GSD, new_GND in zip(self._all_of(layer), (k_GND, v_GND), strict=True):
            write_rows(to_GSD, slots_N.to(to_GSD.device), new_GND.to(to_GSD.device, to_GSD.dtype))

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        slots_N = slots_N.cpu()
        dirty_pages = self.write_slots.dirty(_pages_of(slots_N))
        if layer in self.layout.part:
            if dirty_pages:  # they stay so: others may be writing to them
                self.layout.to_store([layer], *self.places_of(dirty_pages))
            self.synchronize()
        keys_GSD, values_GSD = self._all_of(layer)
        slots_N = slots_N.to(keys_GSD.device)
        return read_rows(keys_GSD, slots_N).to(self.device), read_rows(values_GSD, slots_N).to(self.device)

    def _all_of(self, layer: int) -> KeysValues:
        """All pages of a layer: its home, or on the host."""
        layout = self.layout
        return layout.on_device(layer) if layer in layout.home else layout.of_store(layer)

    def synchronize(self) -> None:
        """Wait for the device: the host is to look at what it has stored, or to change it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prefer(self, layers: Collection[int]) -> bool:
        """Let these be whole, as far as there is room; returns whether any layer has moved."""
        layout = self.layout
        admitted_layers = [layer for layer in sorted(layers) if layer not in layout.home]
        evicted_layers = [layer for layer in reversed(layout.home) if layer not in layers]
        runs = runs_of(self.write_slots.filled_pages)
        slotted_pages = self.write_slots.write_slot_P.nonzero()[0].tolist()
        for admitted_layer, evicted_layer in zip(admitted_layers, evicted_layers, strict=False):
            layout.to_store([admitted_layer], *self.places_of(self.write_slots.dirty(slotted_pages)))
            self.stream.copy_after(self.stream.record_compute())
            buffer = self.buffers.fill(partial(layout.copies_in, admitted_layer, runs))
            self.buffers.use(buffer)
            layout.exchange(evicted_layer, admitted_layer, buffer, runs)
            self.buffers.leave(buffer)
            layout.to_parts([evicted_layer], *self.places_of(slotted_pages))
            self.working.clear(admitted_layer)
        return bool(admitted_layers and evicted_layers)


def _pages_of(slots_N: Tensor) -> list[int]:
    """Each page once, of slots on the host."""
    return [*map(int, np.unique(slots_N.numpy() // PAGE))]
