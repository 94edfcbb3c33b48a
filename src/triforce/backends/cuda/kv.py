"""KV memory for the Triton kernels: a head's pages are contiguous, as rows of numbers or as pages of int8 codes.

Shape suffixes as in kernel_api.py; P positions of the tables.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from triforce.arrays import Array, DType
from triforce.backends.cuda.graphs import PassInputs, ViewShape
from triforce.backends.cuda.kv_pages import as_numbers, is_coded, read_rows, write_rows
from triforce.backends.cuda.splits import split_of
from triforce.backends.cuda.triton.attention import DevicePageTable, attend
from triforce.backends.cuda.triton.pointwise import rotate_and_write
from triforce.backends.current_device import device_context
from triforce.backends.kernel_api import ForwardBatch, KeysValues, LayerAttention, PageTable, Rotation
from triforce.backends.torch.int8_rows import rotated_head, rounded_queries
from triforce.backends.torch.kv import TorchKV, attend_tables
from triforce.model.config import ModelConfig
from triforce.model.kv_rows import hadamard_size_of
from triforce.model.rope import RESERVED

EXTRA_POSITIONS = 4096
"""Positions beyond the model's that the tables cover at first: draft tokens may reach there."""


class TritonKV(TorchKV):
    def __init__(
        self, config: ModelConfig, pages: int, dtype: DType, device: str = "cpu", layers: int | None = None
    ) -> None:
        super().__init__(config, pages, dtype, device, layers)
        self.tables_PF = self._rotations(min(config.context, RESERVED) + EXTRA_POSITIONS)
        self.hadamard_size = hadamard_size_of(config)
        self.version = 0
        """Version of the tensors that captured passes refer to. A move of any of them raises it by one."""
        self.capturable = True
        """Whether the last prepared pass may be captured and replayed."""

    def prepare(self, batch: ForwardBatch, width: int) -> None:
        """Prepare a pass of `width` tokens a row: extend the rotation tables to its positions."""
        end = max(batch.positions) + width
        if end > len(self.tables_PF[0]):
            self.tables_PF = self._rotations(2 * end)
            self.version += 1

    def write(self, layer: int, slots_N: Tensor, k_GND: Array, v_GND: Array) -> None:
        for memory_GSD, new_GND in zip(self._open(layer), (k_GND, v_GND), strict=True):
            write_rows(memory_GSD, slots_N, self.array(new_GND))

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        keys_GSD, values_GSD = self._open(layer)
        return read_rows(keys_GSD, slots_N), read_rows(values_GSD, slots_N)

    def view(self, layer: int, first_slot: int, count: int) -> KeysValues:
        if self.config.kv_int8:
            return self.read(layer, torch.arange(first_slot, first_slot + count, device=self.device))
        return super().view(layer, first_slot, count)

    def attend(self, layer: int, q_BTHD: Tensor, page_table: PageTable) -> Tensor:
        starts_B, counts_B = (
            torch.tensor(row_values, device=self.device) for row_values in (page_table.starts, page_table.counts)
        )
        sinks = page_table.sinks
        window = page_table.window
        device_table = DevicePageTable(page_table.units, starts_B, counts_B, page_table.unit, sinks, window)
        with device_context(self.device):
            return attend(q_BTHD, *self._open(layer), device_table, hadamard_size=self.hadamard_size)[0]

    def device_attention(self, inputs: PassInputs, wide_tables: list[PageTable] | None = None) -> LayerAttention:
        """Return the attention of `layer_attention` for a pass on the device, as a function of the buffers of `inputs`.

        wide_tables: each layer's page table for torch's fused attention; None: Triton attention.
        """
        tables_L = self._layer_tables(inputs)
        return_mass = inputs.shape.return_mass

        def attention(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            units, starts_B, view = tables_L[layer]
            kv = self._open(layer)
            page_table = DevicePageTable(units, starts_B, inputs.counts_B, view.unit, view.sinks, view.window)
            wide_table = wide_tables[layer] if wide_tables else None
            by_head = len(view.units) > 2
            outputs = write_and_attend(
                (q_BTHD, k_BTGD, v_BTGD), inputs.positions_B, self.tables_PF, page_table, kv, self.hadamard_size,
                wide_table, return_mass, by_head,
            )  # fmt: skip
            self._close(layer, page_table, outputs[2])
            return outputs

        return attention

    def _layer_tables(self, inputs: PassInputs) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Return each layer's page table: units, which index the memory that `_open` returns; starts; settings."""
        return inputs.layer_tables()

    def _open(self, layer: int) -> KeysValues:
        """Return a layer's keys and values in this pass, (G, S, D) each."""
        return self.keys_LGSD[layer], self.values_LGSD[layer]

    def _close(self, layer: int, page_table: DevicePageTable, mass_BGU: Tensor) -> None:
        """Finish a layer's attention in this pass."""

    def _rotations(self, length: int) -> Rotation:
        return self._rope.cos_sin(torch.arange(length, device=self.device))


def write_and_attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    positions_B: Tensor,
    tables_PF: Rotation,
    page_table: DevicePageTable,
    kv: KeysValues,
    hadamard_size: int,
    wide_table: PageTable | None = None,
    return_mass: bool = False,
    by_head: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a layer's new keys and values, and attend: return rotated queries, mixed values, and mass.

    hadamard_size: as `kv_rows.hadamard_size_of` returns it. wide_table: the page table for torch's fused
    attention; None: Triton attention. by_head: whether each KV head has its own units, which decides the split size.
    """
    q_BTHD, q_sinks_BTHD = rotate_and_write(qkv, positions_B, tables_PF, page_table, kv, hadamard_size)
    if wide_table:
        mixed_BTHD, mass_BGU = _attend_wide(q_BTHD, kv, wide_table)
        return q_BTHD, rotated_head(mixed_BTHD).to(q_BTHD.dtype) if hadamard_size > 1 else mixed_BTHD, mass_BGU
    H = q_BTHD.shape[2]
    G = len(kv[0])
    split = split_of(by_head, page_table.window, H // G)
    return q_BTHD, *attend(q_BTHD, *kv, page_table, return_mass, q_sinks_BTHD, split, hadamard_size)


def _attend_wide(q_BTHD: Tensor, kv: KeysValues, page_table: PageTable) -> tuple[Tensor, Tensor]:
    """Attend as `attend_tables` does.

    For int8 KV the rows of the table's pages are first unpacked to numbers of the queries' type, and the queries are
    rounded as for products with int8 keys. Mixed values are in the queries' type before heads are rotated back.
    """
    if is_coded(kv[0]):
        q_BTHD = rounded_queries(q_BTHD).to(q_BTHD.dtype)
        units_X1 = page_table.units.long().view(-1, 1)
        slots_N = (units_X1 * page_table.unit + torch.arange(page_table.unit, device=units_X1.device)).flatten()
        kv = as_numbers(kv, slots_N, q_BTHD.dtype)
        consecutive_units = torch.arange(len(units_X1), device=units_X1.device).view(page_table.units.shape)
        page_table = replace(page_table, units=consecutive_units)
    return attend_tables(q_BTHD, kv, page_table)
