"""KV memory for the Triton kernels whose pages lie in pinned host memory.

A pass over all keys streams layers through two buffers: one layer computes with its buffer while the next layer's
buffer is filled. Each layer's pages of most mass stay in the working set. A pass whose KV heads have their own page
lists looks these pages up in the working set. The device itself reads missing pages from the host, so that such passes
can be captured. A prompt is read layer by layer, all of its tokens through one layer before the next. The KV of each
layer is thus copied to the host once. Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce.arrays import Array, DType
from triforce.backends.cuda.graphs import PassInputs, ViewShape
from triforce.backends.cuda.kv import TritonKV, write_and_attend
from triforce.backends.cuda.offload.frames import Run, runs_of
from triforce.backends.cuda.offload.residency import OffloadManager
from triforce.backends.cuda.triton.attention import DevicePageTable
from triforce.backends.current_device import device_context
from triforce.backends.kernel_api import (
    PAGE,
    ForwardBatch,
    KeysValues,
    LayerBackend,
    ModelBackend,
    OffloadLayout,
    PageTable,
    pages_for,
)
from triforce.backends.torch.kv import MAX_NARROW_WIDTH
from triforce.interface.outputs import KVMemoryUsage
from triforce.model.config import ModelConfig
from triforce.ragged import Ints

PROMPT_CHUNK = 8192
"""Tokens of a prompt that go through a layer together. Chunks end at multiples of it, counted from the text's start."""
Places = tuple[Tensor, Tensor]
"""Write slots of some pages, as places of frames; and the pages, as places of a layer memory."""


@dataclass
class StreamPlan:
    """Plan of a pass's reads from the host: which layers, and which pages."""

    layers: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    write_slot_places: Places | None = None
    """Pages with write slots, whose contents may be newer than in the store."""
    written_places: Places | None = None
    """Pages that the pass writes."""
    retained_pages: int = 0
    filled: dict[int, int] = field(default_factory=dict)
    """Buffer of each layer that is filled ahead."""


class TritonOffloadedKV(TritonKV):
    def __init__(
        self, config: ModelConfig, pages: int, dtype: DType, device: str, offload_layout: OffloadLayout
    ) -> None:
        super().__init__(config, pages, dtype, device, offload_layout.resident_layers + offload_layout.buffers)
        self.offload_layout = offload_layout
        self.max_resident_layers = offload_layout.resident_layers
        self.manager = OffloadManager(config, pages, offload_layout, (self.keys_LGSD, self.values_LGSD))
        self._streams = StreamPlan()
        self._streamed = 0

    @property
    def bytes(self) -> KVMemoryUsage:
        return KVMemoryUsage(self.offload_layout.memory, *self.offload_layout.store.usage)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the host since this memory was made; waits for the device."""
        return (self._streamed + int(self.manager.fetched)) * self.offload_layout.page_bytes

    def prefer(self, layers: Collection[int]) -> None:
        with device_context(self.device):
            self.version += self.manager.prefer(layers)

    def reserve(self, pages: Sequence[int]) -> None:
        """Do nothing: the host's memory is already allocated."""

    def forget(self, pages: Sequence[int]) -> None:
        self.manager.write_slots.forget(pages)  # copies on the device stay mapped until the pages are written to

    def commit(self, pages: Sequence[int]) -> None:
        """Do nothing: pages leave when other pages need their write slots."""

    def write(self, layer: int, slots_N: Tensor, k_GND: Array, v_GND: Array) -> None:
        with device_context(self.device):
            self.manager.write(layer, slots_N, k_GND, v_GND)

    def read(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        with device_context(self.device):
            return self.manager.read(layer, slots_N)

    def view(self, layer: int, first_slot: int, count: int) -> tuple[Tensor, Tensor]:
        return self.read(layer, torch.arange(first_slot, first_slot + count))

    def prepare(self, batch: ForwardBatch, width: int) -> None:
        super().prepare(batch, width)
        manager = self.manager
        counts = batch.views[0][1].counts
        batch_rows = zip(batch.tables, batch.positions, counts, strict=True)
        rows = [(table, at, count) for table, at, count in batch_rows if count]
        if batch.past_committed:
            manager.store([page for table, at, _ in rows for page in manager.write_slots.mark_full_stored(table, at)])
        written_pages = dict.fromkeys(
            page for table, at, count in rows for page in table[at // PAGE : pages_for(at + count)]
        )
        manager.begin_write([*written_pages])
        self._streams = StreamPlan(self._to_stream(batch))
        self.capturable = not self._streams.layers
        if self._streams.layers:
            self._prepare([page for table, at, _ in rows for page in table[: pages_for(at)]], [*written_pages])
            self._streams.retained_pages = min(batch.retained_pages, manager.layout.frames // max(1, len(rows)))
            self._fill(self._streams.layers[0])

    def _to_stream(self, batch: ForwardBatch) -> list[int]:
        """Return the layers to stream: all offloaded ones of an exact pass, or views larger than the working set."""
        layers: list[int] = []
        first_layer = 0
        for count, page_table in batch.views:
            row_ends = zip(page_table.starts, page_table.counts, strict=True)
            pages = sum(pages_for(start + new) for start, new in row_ends if new)
            if batch.past_committed or pages > self.manager.layout.frames:
                layers += range(first_layer, first_layer + count)
            first_layer += count
        return [layer for layer in layers if layer in self.manager.layout.cached_index]

    def _prepare(self, read_pages: list[int], written_pages: list[int]) -> None:
        """Plan the runs of pages to read, and the places of pages with write slots, and of pages to write."""
        streams = self._streams
        manager = self.manager
        pages_N = np.unique(np.array(read_pages, dtype=np.int64))
        write_slots_N = manager.write_slots.write_slot_P[pages_N]
        assert (manager.write_slots.stored_P[pages_N] | (write_slots_N > 0)).all(), (
            "a page without contents is to be read"
        )
        streams.runs = runs_of(pages_N.tolist())
        streams.write_slot_places = manager.places_of(pages_N[write_slots_N > 0].tolist())
        streams.written_places = manager.places_of(written_pages)
        manager.stream.copy_after(manager.stream.record_compute())  # after the copies that stored pages

    def _fill(self, layer: int) -> None:
        manager = self.manager
        runs = self._streams.runs
        self._streams.filled[layer] = manager.buffers.fill(partial(manager.layout.copies_in, layer, runs))
        self._streamed += self.config.kv_heads * sum(count for _, count in runs)

    def _layer_tables(self, inputs: PassInputs) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Return page tables. Layers that are neither resident nor streamed have frames in place of pages."""
        tables_L = super()._layer_tables(inputs)
        first_layer = 0
        for view, units, starts_B in zip(inputs.shape.views, inputs.units, inputs.starts, strict=True):
            layers = range(first_layer, first_layer + view.layers)
            first_layer = first_layer + view.layers
            framed_layers = [
                layer for layer in layers if layer in self.manager.layout.cached_index.keys() - {*self._streams.layers}
            ]
            if framed_layers:
                units_LBGU = self._find(slice(layers.start, layers.stop), units, starts_B, inputs.counts_B)
                for layer in framed_layers:
                    tables_L[layer] = (units_LBGU[layer - layers.start], starts_B, view)
        return tables_L

    def _find(self, layers: slice, units: Tensor, starts_B: Tensor, counts_B: Tensor) -> Tensor:
        """Bring the visible pages of page tables into frames; return the frames, int (L, B, G, U)."""
        L = layers.stop - layers.start
        G = self.config.kv_heads
        units_LBGU = (units[:, None] if units.ndim == 2 else units).long().expand(L, len(starts_B), G, -1)
        unit_starts_U = torch.arange(units_LBGU.shape[3], device=self.device) * PAGE
        visible_BU = (unit_starts_U < (starts_B + counts_B)[:, None]) & (counts_B > 0)[:, None]
        pages_LBGU = units_LBGU * visible_BU[:, None] * self.manager.layout.is_cached_L[layers, None, None, None]
        self.manager.find(layers, pages_LBGU.transpose(1, 2).flatten(2))
        frames_LGN = self.manager.working.frames_LGP[layers].gather(2, units_LBGU.transpose(1, 2).flatten(2))
        return frames_LGN.view(L, G, len(starts_B), -1).transpose(1, 2)

    def _open(self, layer: int) -> KeysValues:
        streams = self._streams
        layout = self.manager.layout
        if layer not in streams.layers:
            return layout.on_device(layer)
        next_index = streams.layers.index(layer) + 1
        if next_index < len(streams.layers):
            self._fill(streams.layers[next_index])
        buffer = streams.filled[layer]
        self.manager.buffers.use(buffer)
        assert streams.write_slot_places is not None
        layout.frames_to_buffer(layer, buffer, *streams.write_slot_places)
        return layout.layer_memory(buffer)

    def _close(self, layer: int, page_table: DevicePageTable, mass_BGU: Tensor) -> None:
        streams = self._streams
        manager = self.manager
        if layer not in streams.layers:
            return
        buffer = streams.filled[layer]
        assert streams.written_places is not None
        manager.layout.buffer_to_frames(layer, buffer, *streams.written_places)
        if streams.retained_pages and mass_BGU.numel():
            manager.keep(layer, buffer, _heaviest_pages(page_table, mass_BGU, streams.retained_pages))
        manager.buffers.release(buffer)

    def read_prompt(self, model: ModelBackend, ids_1T: Ints, batch: ForwardBatch) -> Generator[int, None, None]:
        """Run `OffloadedKVBackend.read_prompt`; between two layers other passes may use the buffers."""
        manager = self.manager
        (start,) = batch.positions
        (table,) = batch.tables
        T = ids_1T.shape[1]
        earlier_runs = runs_of(sorted(table[: pages_for(start)]))
        new_pages = table[start // PAGE : pages_for(start + T)]
        manager.store([*manager.write_slots.mark_full_stored(table, start), *manager.write_slots.dirty(new_pages[:1])])
        manager.drop(new_pages)
        new_runs = runs_of(sorted(new_pages))
        x_TC = model.embed(ids_1T.reshape(-1))
        ends = [*range((start // PROMPT_CHUNK + 1) * PROMPT_CHUNK, start + T, PROMPT_CHUNK), start + T]
        layout = manager.layout
        stream = manager.stream
        units_1U = batch.views[0][1].units
        try:
            for layer, block in enumerate(model.blocks):
                is_resident = layer in layout.resident_index
                if not is_resident:
                    stream.copy_after(stream.record_compute())
                    buffer = manager.buffers.fill(partial(layout.copies_in, layer, earlier_runs))
                    manager.buffers.use(buffer)
                memory_index = layout.resident_index[layer] if is_resident else buffer
                for at, end in zip([start, *ends], ends, strict=False):
                    x_NC = x_TC[at - start : end - start]
                    is_last_layer = layer + 1 == len(model.blocks)
                    self._run_layer(block, x_NC, at, units_1U, memory_index, is_last_layer)
                if not is_resident:
                    manager.buffers.release(buffer, layout.copies_out(layer, new_runs, buffer))
                yield (layer + 1) * T // len(model.blocks)
            manager.write_slots.mark_stored(new_pages)
        finally:
            stream.compute_after(stream.record_copy())

    def _run_layer(
        self, block: LayerBackend, x_NC: Tensor, at: int, units_1U: Tensor, memory_index: int, is_last_layer: bool
    ) -> None:
        """Take tokens from `at` on through one layer; the last layer only writes KV, as its outputs are not read."""
        count = len(x_NC)
        q_1NHD, k_1NGD, v_1NGD = (x.view(1, *x.shape) for x in block.qkv(x_NC))
        at_1, count_1 = (torch.tensor([n], device=x_NC.device) for n in (at, count))
        page_table = DevicePageTable(units_1U, at_1, count_1, PAGE)
        wide = PageTable(units_1U, [at], [count]) if count > MAX_NARROW_WIDTH else None
        _, attn_out_1NHD, _ = write_and_attend(
            (q_1NHD, k_1NGD, v_1NGD), at_1, self.tables_PF, page_table, self.manager.layout.layer_memory(memory_index),
            self.hadamard_size, wide,
        )  # fmt: skip
        if not is_last_layer:
            block.finish(x_NC, attn_out_1NHD[0].flatten(1))


def _heaviest_pages(page_table: DevicePageTable, mass_BGU: Tensor, count: int) -> Tensor:
    """Return the `count` pages of most mass of each KV head and row, among pages full of earlier tokens: (G, N).

    0 where there are fewer such pages.
    """
    B, G, U = mass_BGU.shape
    full_B = page_table.starts_B // PAGE * (page_table.counts_B > 0)
    mass_BGU = mass_BGU.masked_fill(torch.arange(U, device=full_B.device) >= full_B[:, None, None], -1.0)
    top = mass_BGU.topk(min(count, U), dim=2)
    pages_BGN = page_table.units[:, None].expand(B, G, U).gather(2, top.indices) * (top.values >= 0)
    return pages_BGN.transpose(0, 1).flatten(1).long()
