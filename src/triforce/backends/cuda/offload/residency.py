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

    def __init__(self, config: ModelConfig, pages: int, room: OffloadLayout, homes: KeysValues) -> None:
        self.device = homes[0].device
        self.layout = DeviceLayout(config, pages, room, homes)
        self.seats = WriteSlots(pages, self.layout.seats)
        sizes = self.layout.seats, self.layout.frames
        self.working = WorkingSet(config.layers, config.kv_heads, pages, *sizes, self.device)
        self.stream = CopyStream(self.device)
        self.buffers = Buffers(self.stream, range(room.layers, room.layers + room.buffers))
        self.fetched = torch.zeros((), dtype=torch.int64, device=self.device)
        """Pages of single KV heads that were read because they were not there."""

    def at(self, pages: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The seats of some pages, as places of a part, and the pages themselves."""
        pages_N, seats_N = self._seated([*pages])
        return self.layout.at_frames(seats_N).flatten(), self.layout.at_pages(pages_N).flatten()

    def store(self, pages: Sequence[int]) -> None:
        """Pages with seats, as they are."""
        if pages:
            self.layout.to_store(self.layout.part, *self.at(pages))
            self.seats.store(pages)

    def begin_write(self, pages: Sequence[int]) -> None:
        """Make pages ready to be written, by what goes on where they end. Raises CacheError."""
        out = self.seats.making_room(pages)
        self.store(self.seats.fresh(out))
        self.seats.leave(out)
        new = self.seats.write(pages)
        if new or out:
            self._tell([*out, *new])
        if begun := [page for page in new if self.seats.stored_P[page]]:  # the text was cut
            self.layout.to_parts(self.layout.part, *self.at(begun))

    def leave(self, pages: Sequence[int]) -> None:
        """Drop what the device has of these pages."""
        self.seats.leave(pages)
        self._tell(pages)

    def _tell(self, pages: Sequence[int]) -> None:
        self.working.seat(*self._seated(pages))

    def _seated(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Pages and their seats, on the device."""
        pages_N = ints([*pages])
        return to_device(pages_N, self.device), to_device(self.seats.seat_P[pages_N], self.device)

    def find(self, layers: slice, wanted_LGN: Tensor) -> None:
        """See that pages of single KV heads have frames in these layers; 0 is none, as is a page of a whole layer."""
        pages_LGN, frames_LGN = self.working.take(layers, wanted_LGN)
        self.fetched += (pages_LGN > 0).sum()
        self.layout.fetch(layers, pages_LGN, frames_LGN)

    def keep(self, layer: int, home: int, wanted_GN: Tensor) -> None:
        """See that pages of single KV heads have frames; they come from the layer's home, where all are."""
        pages_1GN, frames_1GN = self.working.take(slice(layer, layer + 1), wanted_GN[None])
        layout = self.layout
        layout.to_part(layer, home, layout.at_frames(frames_1GN).flatten(), layout.at_pages(pages_1GN).flatten())

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        slots_N = slots_N.cpu()
        pages = _pages(slots_N)
        self.store(self.seats.fresh(pages))  # the slots may be a part of what they hold
        self.leave(pages)
        self.seats.stored_P[pages] = True
        if layer in self.layout.part:
            self.finish()
        for to_GSD, new_GND in zip(self._all_of(layer), (k_GND, v_GND), strict=True):
            write_rows(to_GSD, slots_N.to(to_GSD.device), new_GND.to(to_GSD.device, to_GSD.dtype))

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        slots_N = slots_N.cpu()
        fresh = self.seats.fresh(_pages(slots_N))
        if layer in self.layout.part:
            if fresh:  # they stay so: others may be writing to them
                self.layout.to_store([layer], *self.at(fresh))
            self.finish()
        keys_GSD, values_GSD = self._all_of(layer)
        slots_N = slots_N.to(keys_GSD.device)
        return read_rows(keys_GSD, slots_N).to(self.device), read_rows(values_GSD, slots_N).to(self.device)

    def _all_of(self, layer: int) -> KeysValues:
        """All pages of a layer: its home, or on the host."""
        layout = self.layout
        return layout.on_device(layer) if layer in layout.home else layout.of_store(layer)

    def finish(self) -> None:
        """Wait for the device: the host is to look at what it has stored, or to change it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prefer(self, layers: Collection[int]) -> bool:
        """Let these be whole, as far as there is room; returns whether any layer has moved."""
        layout = self.layout
        new = [layer for layer in sorted(layers) if layer not in layout.home]
        old = [layer for layer in reversed(layout.home) if layer not in layers]
        runs = runs_of(self.seats.known)
        seated = self.seats.seat_P.nonzero()[0].tolist()
        for coming, going in zip(new, old, strict=False):
            layout.to_store([coming], *self.at(self.seats.fresh(seated)))
            self.stream.after(self.stream.computed())
            buffer = self.buffers.fill(partial(layout.copies_in, coming, runs))
            self.buffers.use(buffer)
            layout.exchange(going, coming, buffer, runs)
            self.buffers.leave(buffer)
            layout.to_parts([going], *self.at(seated))
            self.working.clear(coming)
        return bool(new and old)


def _pages(slots_N: Tensor) -> list[int]:
    """Each page once, of slots on the host."""
    return [*map(int, np.unique(slots_N.numpy() // PAGE))]
