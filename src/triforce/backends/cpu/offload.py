"""KV memory that is larger than what is kept of it: its pages lie in a store, and a pass reads them ahead of itself.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import NOTHING, NativeKV
from triforce.backends.cpu.layerwise import Mix, one_layer, rotations
from triforce.backends.cpu.model import NativeModel
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, ModelBackend, PageTable
from triforce.backends.offload_layout import SECTOR, OffloadLayout
from triforce.backends.torch.kv import allocate
from triforce.errors import CacheError
from triforce.interface.outputs import KVMemoryUsage
from triforce.model.config import ModelConfig

AT_ONCE = 512
"""Tokens of a prompt that go through a layer together: their activations stay in the caches."""


class NativeOffloadedKV(NativeKV):
    searches = False
    """What is searched would have to be at hand: layers that need it are kept whole instead, and seen in full."""

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, room: OffloadLayout) -> None:
        self.config, self.dtype, self.int8, self.room = config, dtype, False, room
        store = room.store.memory
        self._native_store = (
            _native.Store(room.store.file, room.store.direct, room.store.bytes)
            if store is None
            else _native.Store(store)
        )
        arena = allocate((room.memory + SECTOR,), torch.uint8, "cpu")
        arena = arena[-arena.data_ptr() % SECTOR :][: room.memory]
        self._offload = _native.Offload(
            arena, dtype == torch.bfloat16, config.layers, config.kv_heads, config.head_dim, pages + 1,
            room.frames, room.buffers, room.buffer_frames, self._native_store,
        )  # fmt: skip
        self._layers = [self._offload.layer(i) for i in range(config.layers)]
        self._whole: list[int] = []
        self.prefer(range(config.layers))

    @property
    def bytes(self) -> KVMemoryUsage:
        mine = self.room.memory, *self.room.store.usage
        return KVMemoryUsage(*(self.config.ranks * each for each in mine))

    @property
    def whole_layers(self) -> int:
        return self.room.layers

    def prefer(self, layers: Collection[int]) -> None:
        chosen = [*sorted(layers), *(layer for layer in self._whole if layer not in layers)][: self.whole_layers]
        self._whole = chosen
        self._offload.favour([layer in chosen for layer in range(self.config.layers)])

    @property
    def bytes_read(self) -> int:
        """From the store, since it is there."""
        return int(self._native_store.bytes_read)

    def limit(self, bytes_per_second: float) -> None:
        """Reads take as long as on a bus of this rate: for measurements. 0 is no limit."""
        self._native_store.limit(bytes_per_second)

    def reserve(self, pages: Sequence[int]) -> None:
        with self._told():
            self._offload.reserve(list(pages))

    def forget(self, pages: Sequence[int]) -> None:
        self._offload.forget(list(pages))

    def forward(self, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None, this: ForwardBatch) -> ForwardOutput:
        with self._told():
            return super().forward(model, ids_BT, at_BJ, this)

    def read(self, model: ModelBackend, ids_1T: Tensor, this: ForwardBatch) -> Iterator[int]:
        config, T, ((_, lists),) = self.config, ids_1T.shape[1], this.views
        x_1TC = torch.empty(1, T, config.hidden_size)
        ends = (lists.starts[0] // PAGE, (lists.starts[0] + T) // PAGE)
        full: list[int] = lists.units[0, ends[0] : ends[1]].tolist()
        for layer in range(config.layers):
            for first in range(0, T, AT_ONCE):
                part = slice(first, min(first + AT_ONCE, T))
                seen = replace(lists, starts=[lists.starts[0] + first], counts=[part.stop - first])
                here = ForwardBatch([this.positions[0] + first], [(config.layers, seen)], exact=True)
                with self._told():
                    self._read_layer(model, layer, ids_1T[:, part].contiguous(), x_1TC[:, part], here)
                if part.stop == T:
                    with self._told():
                        self._offload.commit(layer, full)
                yield (layer * T + part.stop) // config.layers

    def _read_layer(self, model: ModelBackend, layer: int, ids_1T: Tensor, x_1TC: Tensor, this: ForwardBatch) -> None:
        T, ((layers, lists),) = ids_1T.shape[1], this.views
        if not isinstance(model, NativeModel):
            return one_layer(self, model, layer, ids_1T, x_1TC, replace(this, views=[(1, lists)]))
        nothing, logits = torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, self.config.vocab_size)
        model.decoder.run(
            self._layers, ids_1T, this.positions, lists.counts, *rotations(self.config.rope, this, T),
            [(layers, lists.units, lists.starts, 0, 0, [], NOTHING)],
            nothing, logits, None, None, layer, layer + 1, x_1TC, exact=True,
        )  # fmt: skip

    def mixing(self, width: int, this: ForwardBatch, first: int) -> Mix:
        lists_L = this.lists()
        seen = [(lists.units, lists.starts) for lists in lists_L]
        native = _native.LayeredPass(self._offload, first, seen, lists_L[0].counts, width, this.exact, this.keep)

        def mix(layer: int, q_BTHD: Tensor, q_sinks_BTHD: Tensor | None) -> tuple[Tensor, Tensor]:
            mixed_BTHD = torch.empty_like(q_BTHD)
            shape = (len(q_BTHD), self.config.kv_heads, lists_L[layer - first].units.shape[-1])
            mass_BGU = torch.empty(shape) if this.weigh else None
            native.attend(layer, q_BTHD, mixed_BTHD, mass_BGU)
            return mixed_BTHD, torch.empty(0) if mass_BGU is None else mass_BGU

        return mix

    def attend(
        self, layer: int, q_BTHD: Tensor, lists: PageTable, weigh: bool = False, q_sinks_BTHD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with self._told():
            return super().attend(layer, q_BTHD, lists, weigh, q_sinks_BTHD)

    def put(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        with self._told():
            super().put(layer, slots_N, k_GND, v_GND)

    def get(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        with self._told():
            return super().get(layer, slots_N)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except _native.OffloadError as error:
            raise CacheError(str(error)) from error
