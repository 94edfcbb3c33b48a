"""KV memory for the Triton kernels whose pages lie in pinned host memory.

A pass of the exact view goes through two buffers, layer by layer: each is filled while another one computes, and what
a layer gave most mass stays in the working set. A pass over lists of KV heads' own finds them there; the device itself
reads from the host what is not there, so that such passes can be captured. Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce.backends.cuda.graph_inputs import GraphInputs, ViewShape
from triforce.backends.cuda.kv import Captured, TritonKV
from triforce.backends.cuda.offload.layout import Run, runs_of
from triforce.backends.cuda.offload.prefill import read
from triforce.backends.cuda.offload.residency import OffloadManager
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.cuda.triton.page_copy import KeysValues
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, ModelBackend, PageTable, pages_for
from triforce.backends.offload_layout import OffloadLayout
from triforce.interface.outputs import KVMemoryUsage
from triforce.model.config import ModelConfig

Places = tuple[Tensor, Tensor]
"""Pages as places of a part and of a home."""


@dataclass
class StreamPlan:
    """What a pass brings from the host: for which layers, and which pages."""

    layers: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    seated: Places | None = None
    """Pages that are newer than what the store has."""
    written: Places | None = None
    keep: int = 0
    filled: dict[int, int] = field(default_factory=dict)
    """The buffers of the layers that are next."""


class TritonOffloadedKV(TritonKV):
    def __init__(
        self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device | str, room: OffloadLayout
    ) -> None:
        super().__init__(config, pages, dtype, device, room.layers + room.buffers)
        self.room, self._hosted = room, OffloadManager(config, pages, room, (self.keys_LGSD, self.values_LGSD))
        self._streams, self._streamed = StreamPlan(), 0

    @property
    def bytes(self) -> KVMemoryUsage:
        return KVMemoryUsage(self.room.memory, *self.room.store.usage)

    @property
    def whole_layers(self) -> int:
        return self.room.layers

    @property
    def bytes_read(self) -> int:
        """From the host, since it is there; waits for the device."""
        return (self._streamed + int(self._hosted.fetched)) * self.room.page_bytes

    def prefer(self, layers: Collection[int]) -> None:
        if self._hosted.prefer(layers):
            self._graphs.clear()

    def reserve(self, pages: Sequence[int]) -> None:
        """The host's memory is there already."""

    def forget(self, pages: Sequence[int]) -> None:
        self._hosted.forget(pages)

    def put(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        self._hosted.put(layer, slots_N, k_GND, v_GND)

    def get(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        return self._hosted.get(layer, slots_N)

    def run(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self.get(layer, torch.arange(first, first + count))

    def read(self, model: ModelBackend, ids_1T: Tensor, this: ForwardBatch) -> Iterator[int]:
        return read(self._hosted, self._tables_PF, model, ids_1T, this)

    def forward(self, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None, this: ForwardBatch) -> ForwardOutput:
        hosted, counts = self._hosted, this.views[0][1].counts
        each = zip(this.tables, this.positions, counts, strict=True)
        rows = [(table, at, count) for table, at, count in each if count]
        if this.exact:
            hosted.store([page for table, at, _ in rows for page in hosted.seats.leaving(table, at)])
        written = dict.fromkeys(page for table, at, count in rows for page in table[at // PAGE : pages_for(at + count)])
        hosted.write([*written])
        self._streams = StreamPlan(self._to_stream(this))
        if self._streams.layers:
            self._prepare([page for table, at, _ in rows for page in table[: pages_for(at)]], [*written])
            self._streams.keep = min(this.keep, hosted.places.frames // max(1, len(rows)))
            self._fill(self._streams.layers[0])
        return super().forward(model, ids_BT, at_BJ, this)

    def _to_stream(self, this: ForwardBatch) -> list[int]:
        """The layers whose pages come by: of an exact pass, or where more is seen than the working set has room for."""
        layers: list[int] = []
        first = 0
        for count, lists in this.views:
            if this.exact or _pages(lists) > self._hosted.places.frames:
                layers += range(first, first + count)
            first += count
        return [layer for layer in layers if layer in self._hosted.places.part]

    def _prepare(self, seen: list[int], written: list[int]) -> None:
        """Runs of what rows have seen, and where on the device is what they have written."""
        streams, hosted = self._streams, self._hosted
        pages_N = np.unique(np.array(seen, dtype=np.int64))
        seats_N = hosted.seats.seat_P[pages_N]
        assert (hosted.seats.stored_P[pages_N] | (seats_N > 0)).all(), "a page that nobody has is to be read"
        streams.runs = runs_of(pages_N.tolist())
        streams.seated, streams.written = hosted.at(pages_N[seats_N > 0].tolist()), hosted.at(written)
        hosted.lane.after(hosted.lane.computed())  # what has been stored just now

    def _fill(self, layer: int) -> None:
        hosted, runs = self._hosted, self._streams.runs
        self._streams.filled[layer] = hosted.buffers.fill(partial(hosted.places.copies_in, layer, runs))
        self._streamed += self.config.kv_heads * sum(count for _, count in runs)

    def _run(self, captured: Captured) -> ForwardOutput:
        if self._streams.layers:
            return self._pass(captured.model, captured.frame)
        return super()._run(captured)

    def _lists(self, frame: GraphInputs) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Of layers that are neither whole nor streamed, frames in the place of pages."""
        lists_L, first = super()._lists(frame), 0
        for view, units, starts_B in zip(frame.shape.views, frame.units, frame.starts, strict=True):
            layers, first = range(first, first + view.layers), first + view.layers
            found = [layer for layer in layers if layer in self._hosted.places.part.keys() - {*self._streams.layers}]
            if found:
                units_LBGU = self._find(slice(layers.start, layers.stop), units, starts_B, frame.counts_B)
                for layer in found:
                    lists_L[layer] = (units_LBGU[layer - layers.start], starts_B, view)
        return lists_L

    def _find(self, layers: slice, units: Tensor, starts_B: Tensor, counts_B: Tensor) -> Tensor:
        """The frames of what lists see, int32 (L, B, G, U), once they are there."""
        L, G = layers.stop - layers.start, self.config.kv_heads
        units_LBGU = (units[:, None] if units.ndim == 2 else units).long()
        units_LBGU = units_LBGU.expand(L, len(starts_B), G, -1)
        firsts_U = torch.arange(units_LBGU.shape[3], device=self.device) * PAGE
        seen_BU = (firsts_U < (starts_B + counts_B)[:, None]) & (counts_B > 0)[:, None]
        wanted_LBGU = units_LBGU * seen_BU[:, None] * self._hosted.parted_L111[layers]
        self._hosted.find(layers, wanted_LBGU.transpose(1, 2).flatten(2))
        frames_LGN = self._hosted.working.frames_LGP[layers].gather(2, units_LBGU.transpose(1, 2).flatten(2))
        return frames_LGN.view(L, G, len(starts_B), -1).transpose(1, 2)

    def _open(self, layer: int) -> KeysValues:
        streams, places = self._streams, self._hosted.places
        if layer not in streams.layers:
            return places.on_device(layer)
        following = streams.layers.index(layer) + 1
        if following < len(streams.layers):
            self._fill(streams.layers[following])
        home = streams.filled[layer]
        self._hosted.buffers.use(home)
        assert streams.seated is not None
        places.from_part(layer, home, *streams.seated)
        return places.of_home(home)

    def _close(self, layer: int, seen: DevicePageTable, mass_BGU: Tensor) -> None:
        streams, hosted = self._streams, self._hosted
        if layer not in streams.layers:
            return
        home = streams.filled[layer]
        assert streams.written is not None
        hosted.places.to_part(layer, home, *streams.written)
        if streams.keep and mass_BGU.numel():
            hosted.keep(layer, home, _favourites(seen, mass_BGU, streams.keep))
        hosted.buffers.leave(home)


def _favourites(seen: DevicePageTable, mass_BGU: Tensor, count: int) -> Tensor:
    """The pages of most mass of each KV head, so many of each row, of those that are full of what came before: (G, N).

    0 where there are fewer.
    """
    B, G, U = mass_BGU.shape
    full_B = seen.starts_B // PAGE * (seen.counts_B > 0)
    mass_BGU = mass_BGU.masked_fill(torch.arange(U, device=full_B.device) >= full_B[:, None, None], -1.0)
    top = mass_BGU.topk(min(count, U), dim=2)
    pages_BGN = seen.units[:, None].expand(B, G, U).gather(2, top.indices) * (top.values >= 0)
    return pages_BGN.transpose(0, 1).flatten(1).long()


def _pages(lists: PageTable) -> int:
    """How many the lists of a pass name, of one layer and KV head."""
    return sum(pages_for(start + count) for start, count in zip(lists.starts, lists.counts, strict=True) if count)
