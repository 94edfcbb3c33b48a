"""KV memory whose pages lie in a store, larger than its resident part: a pass reads pages ahead of their use.

A prompt is read layer by layer, all of its tokens through one layer before the next. The KV of each layer is thus
written to the store once.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from triforce.arrays import Array, DType
from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import AttendRotated, NativeKV, allocate, offload_errors, rotations
from triforce.backends.cpu.model import NO_COLUMNS_10, NativeModel, native_view
from triforce.backends.kernel_api import PAGE, SECTOR, ForwardBatch, LayerAttention, ModelBackend, OffloadLayout
from triforce.interface.outputs import KVMemoryUsage
from triforce.model.config import ModelConfig
from triforce.ragged import Ints

PROMPT_CHUNK = 512
"""Tokens of a prompt that go through a layer together: their activations stay in the processor's caches."""


class NativeOffloadedKV(NativeKV):
    searches = False
    """False, as a search would need all keys. Searched layers are kept resident, and attention reads all their keys."""

    def __init__(
        self, config: ModelConfig, pages: int, dtype: DType, offload_layout: OffloadLayout, window_pages: int = 0
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.int8 = False
        self.offload_layout = offload_layout
        self.max_resident_layers = offload_layout.resident_layers
        store = offload_layout.store
        memory = offload_layout.store.memory
        self._store = _native.Store(store.file, store.direct, store.bytes) if memory is None else _native.Store(memory)
        arena = allocate((offload_layout.memory + SECTOR,), np.uint8)
        arena = arena[-arena.ctypes.data % SECTOR :][: offload_layout.memory]
        self._stored_layers: list[int] = []
        """Layers whose pages lie in the store; layers with window pages have them in memory."""
        self.native_pages = self._of_layers(window_pages, partial(self._offload, arena, pages + 1))
        windows = (
            (config.layers - len(self._stored_layers))
            * config.kv_heads
            * (window_pages + 1)
            * offload_layout.page_bytes
        )
        self._memory_bytes = offload_layout.memory + windows
        self._resident_layers = list[int]()
        self.prefer(self._stored_layers)

    def _offload(self, arena: Array, pages: int, layers: list[int]) -> list[_native.Pages]:
        """Return pages of `layers`, `pages` each, that lie in the store or in frames of the arena."""
        config = self.config
        offload_layout = self.offload_layout
        logits_LH = self.config.attention_sink_logits_LH
        self._stored_layers = layers
        self.native_offload = _native.Offload(
            arena=arena, is_bf16=self.dtype == "bfloat16", coded=config.kv_int8, hadamard=config.rotates_heads,
            layers=len(layers), heads=config.kv_heads, dim=config.head_dim, pages=pages, frames=offload_layout.frames,
            buffers=offload_layout.buffers, buffer_frames=offload_layout.buffer_frames, store=self._store,
            attention_sink_logits=None if logits_LH is None else np.ascontiguousarray(logits_LH[layers]),
            score_cap=config.architecture.score_cap,
        )  # fmt: skip
        return [self.native_offload.layer(i) for i in range(len(layers))]

    @property
    def bytes(self) -> KVMemoryUsage:
        rank_bytes = self._memory_bytes, *self.offload_layout.store.usage
        return KVMemoryUsage(*(self.config.ranks * byte_count for byte_count in rank_bytes))

    def prefer(self, layers: Collection[int]) -> None:
        by_priority = [*sorted(layers), *(layer for layer in self._resident_layers if layer not in layers)]
        self._resident_layers = resident_layers = [layer for layer in by_priority if layer in self._stored_layers][
            : self.max_resident_layers
        ]
        self.native_offload.prefer([layer in resident_layers for layer in self._stored_layers])

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store since it was made."""
        return int(self._store.bytes_read)

    def limit(self, bytes_per_second: float) -> None:
        """Make reads take as long as on a bus of `bytes_per_second`, for measurements; 0 is no limit."""
        self._store.limit(bytes_per_second)

    @offload_errors()
    def reserve(self, pages: Sequence[int]) -> None:
        self.native_offload.reserve(list(pages))

    def forget(self, pages: Sequence[int]) -> None:
        self.native_offload.forget(list(pages))

    @offload_errors()
    def commit(self, pages: Sequence[int]) -> None:
        for layer in range(len(self._stored_layers)):
            self.native_offload.commit(layer, list(pages))

    @offload_errors()
    def attention_from(self, batch: ForwardBatch, width: int, first_layer: int) -> LayerAttention:
        return offload_errors()(super().attention_from(batch, width, first_layer))

    def attend_of(self, batch: ForwardBatch, width: int, first_layer: int) -> AttendRotated:
        tables_L = batch.layer_tables()
        in_memory = super().attend_of(batch, width, first_layer)
        if not 0 <= first_layer < first_layer + len(tables_L) <= self.config.layers:
            raise ValueError(f"the model lacks some of layers {first_layer} to {first_layer + len(tables_L) - 1}")
        stored_layers = [layer for layer in self._stored_layers if first_layer <= layer < first_layer + len(tables_L)]
        if not stored_layers:
            return in_memory
        native = _native.LayerwisePass(
            memory=self.native_offload, first_layer=self._stored_layers.index(stored_layers[0]),
            lists=[(table.units, table.starts) for table in (tables_L[layer - first_layer] for layer in stored_layers)],
            counts=tables_L[0].counts, width=width, exact=batch.past_committed, keep=batch.retained_pages,
        )  # fmt: skip

        def attend(layer: int, q_BTHD: Array, q_sinks_BTHD: Array | None) -> tuple[Array, Array]:
            if layer not in stored_layers:
                return in_memory(layer, q_BTHD, q_sinks_BTHD)
            attn_out_BTHD = np.empty_like(q_BTHD)
            shape = (len(q_BTHD), self.config.kv_heads, tables_L[layer - first_layer].units.shape[-1])
            mass_BGU = np.empty(shape, np.float32) if batch.return_mass else None
            native.attend(self._stored_layers.index(layer), q_BTHD, attn_out_BTHD, mass_BGU)
            return attn_out_BTHD, np.empty(0, np.float32) if mass_BGU is None else mass_BGU

        return attend

    attend = offload_errors()(NativeKV.attend)
    write = offload_errors()(NativeKV.write)
    read = offload_errors()(NativeKV.read)

    def read_prompt(self, model: ModelBackend, ids_1T: Ints, batch: ForwardBatch) -> Generator[int, None, None]:
        config = self.config
        T = ids_1T.shape[1]
        ((_, page_table),) = batch.views
        x_1TC = np.empty((1, T, config.hidden_size), np.float32)
        ends = (page_table.starts[0] // PAGE, (page_table.starts[0] + T) // PAGE)
        full_pages: list[int] = page_table.units[0, ends[0] : ends[1]].tolist()
        for layer in range(config.layers):
            for first_token in range(0, T, PROMPT_CHUNK):
                part = slice(first_token, min(first_token + PROMPT_CHUNK, T))
                starts = [page_table.starts[0] + first_token]
                part_table = replace(page_table, starts=starts, counts=[part.stop - first_token])
                positions = [batch.positions[0] + first_token]
                part_batch = ForwardBatch(positions, [(config.layers, part_table)], past_committed=True)
                with offload_errors():
                    self._run_layer(model, layer, np.ascontiguousarray(ids_1T[:, part]), x_1TC[:, part], part_batch)
                    if part.stop == T:
                        self.native_offload.commit(layer, full_pages)
                yield (layer * T + part.stop) // config.layers

    def _run_layer(self, model: ModelBackend, layer: int, ids_1T: Ints, x_1TC: Array, batch: ForwardBatch) -> None:
        T = ids_1T.shape[1]
        ((layers, page_table),) = batch.views
        if not isinstance(model, NativeModel):  # ranks that share a model exchange activations between its layers
            return one_layer(model, layer, ids_1T, x_1TC, self, replace(batch, views=[(1, page_table)]))
        cos, sin = rotations(self.config.rope, batch, T)
        model.decoder.forward(
            memory=self.native_pages, ids=ids_1T, positions=batch.positions, counts=page_table.counts, cos=cos, sin=sin,
            views=[native_view(self, layers, page_table)], at=NO_COLUMNS_10, x=x_1TC, exact=True, first_layer=layer,
            last_layer=layer + 1, logits=np.empty((1, 0, self.config.vocab_size), np.float32),
        )  # fmt: skip


def one_layer(
    model: ModelBackend, layer: int, ids_1T: Ints, x_1TC: Array, kv: NativeOffloadedKV, batch: ForwardBatch
) -> None:
    """Take the residual stream of some tokens through a layer, in place; before layer 0 it is made from their ids."""
    if layer == 0:
        x_1TC[0] = model.embed(ids_1T[0])
    block = model.blocks[layer]
    x_TC = x_1TC[0]
    attention = kv.attention_from(batch, len(x_TC), layer)
    _, attn_out_1THD, _ = attention(layer, *(projection[None] for projection in block.qkv(x_TC)))
    block.finish(x_TC, attn_out_1THD[0].reshape(len(x_TC), -1))
