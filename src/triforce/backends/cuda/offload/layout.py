"""Layout of an offloaded memory on a device: whole layers, buffers, and frames of the other layers.

A home is a layer of all pages on the device: that of a whole layer, or a buffer. The store has all pages of the other
layers, and a part, which is a layer's frames on the device: scratch, seats, working set.

Shape suffixes as in kernel_api.py; P pages, N some pages, X places of pages of all KV heads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from triforce.backends.cuda.offload.copy_stream import Copies
from triforce.backends.cuda.triton.page_copy import carry
from triforce.backends.kernel_api import PAGE, KeysValues
from triforce.backends.offload_layout import OffloadLayout
from triforce.backends.torch.kv import allocate
from triforce.model.config import ModelConfig

Run = tuple[int, int]
"""Consecutive pages: the first, and how many."""


class DeviceLayout:
    def __init__(self, config: ModelConfig, pages: int, room: OffloadLayout, homes: KeysValues) -> None:
        """`homes`: (room.layers + room.buffers, G, S, D) each."""
        self._homes, self._pages, self._size = homes, pages + 1, PAGE * config.row_size
        G, D, keys = config.kv_heads, config.row_size, homes[0]
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
        layers, device = range(len(self.home) + len(self.part)), self._heads_G1.device
        self.parted_L = torch.tensor([layer in self.part for layer in layers], device=device)
        parts_L = torch.tensor([self.part.get(layer, 0) for layer in layers], device=device)
        heads_L11 = parts_L[:, None, None] * len(self._heads_G1)
        self._in_store_L11, self._in_parts_L11 = 2 * heads_L11 * self._pages, heads_L11 * self._frames

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
