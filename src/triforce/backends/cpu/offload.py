"""KV memory that is larger than what is kept of it: its pages lie in a store, and a pass reads them ahead of itself.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.kv import AttendRotated, NativeKV
from triforce.backends.kernel_api import ForwardBatch, LayerAttention, PageTable
from triforce.backends.offload_layout import SECTOR, OffloadLayout
from triforce.backends.torch.kv import allocate
from triforce.errors import CacheError
from triforce.interface.outputs import KVMemoryUsage
from triforce.model.config import ModelConfig


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
            arena=arena, is_bf16=dtype == torch.bfloat16, layers=config.layers, heads=config.kv_heads,
            dim=config.head_dim, pages=pages + 1, frames=room.frames, buffers=room.buffers,
            buffer_frames=room.buffer_frames, store=self._native_store,
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
        self._offload.prefer([layer in chosen for layer in range(self.config.layers)])

    @property
    def bytes_read(self) -> int:
        """Bytes read from the store since it exists."""
        return int(self._native_store.bytes_read)

    def limit(self, bytes_per_second: float) -> None:
        """Reads take as long as on a bus of this rate: for measurements. 0 is no limit."""
        self._native_store.limit(bytes_per_second)

    def reserve(self, pages: Sequence[int]) -> None:
        with offload_errors():
            self._offload.reserve(list(pages))

    def forget(self, pages: Sequence[int]) -> None:
        self._offload.forget(list(pages))

    @property
    def native_offload(self) -> _native.Offload:
        """Mover of pages, for passes that go through a prompt layer by layer."""
        return self._offload

    def attention_from(self, batch: ForwardBatch, width: int, first: int) -> LayerAttention:
        with offload_errors():
            attention = super().attention_from(batch, width, first)

        def guarded(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with offload_errors():
                return attention(layer, q_BTHD, k_BTGD, v_BTGD)

        return guarded

    def attend_of(self, batch: ForwardBatch, width: int, first: int) -> AttendRotated:
        lists_L = batch.lists()
        native = _native.LayerwisePass(
            memory=self._offload, first_layer=first, lists=[(lists.units, lists.starts) for lists in lists_L],
            counts=lists_L[0].counts, width=width, exact=batch.exact, keep=batch.keep,
        )  # fmt: skip

        def attend(layer: int, q_BTHD: Tensor, q_sinks_BTHD: Tensor | None) -> tuple[Tensor, Tensor]:
            attn_out_BTHD = torch.empty_like(q_BTHD)
            shape = (len(q_BTHD), self.config.kv_heads, lists_L[layer - first].units.shape[-1])
            mass_BGU = torch.empty(shape) if batch.return_mass else None
            native.attend(layer, q_BTHD, attn_out_BTHD, mass_BGU)
            return attn_out_BTHD, torch.empty(0) if mass_BGU is None else mass_BGU

        return attend

    def attend(
        self,
        layer: int,
        q_BTHD: Tensor,
        lists: PageTable,
        return_mass: bool = False,
        q_sinks_BTHD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        with offload_errors():
            return super().attend(layer, q_BTHD, lists, return_mass, q_sinks_BTHD)

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        with offload_errors():
            super().write(layer, slots_N, k_GND, v_GND)

    def read(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        with offload_errors():
            return super().read(layer, slots_N)


@contextmanager
def offload_errors() -> Iterator[None]:
    """Raise CacheError where a store fails."""
    try:
        yield
    except _native.OffloadError as error:
        raise CacheError(str(error)) from error
