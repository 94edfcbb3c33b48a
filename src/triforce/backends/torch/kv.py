"""KV memory on the torch path: correct on any device, for any dtype, head size and unit.

A head's pages are contiguous, so that consecutive pages are a plain slice. For int8 KV, D is the size of a row with its
scale. Shape suffixes as in kernel_api.py; L layers, S slots, K keys of a row.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import array_api_compat.torch
import numpy as np
import torch
from torch import Tensor

from triforce.arrays import Array, DType, on_device, to_host
from triforce.backends.kernel_api import PAGE, ForwardBatch, KeysValues, LayerAttention, PageTable, Rotation
from triforce.backends.kv_memory import in_order, kv_memory_error, slots_of
from triforce.backends.torch.attention import attend, attend_causal
from triforce.backends.torch.int8_rows import numbers, rotated_head, rounded, rounded_queries
from triforce.backends.torch.rotation import RopeTensors, rotate
from triforce.backends.torch.tensors import tensor_of, torch_dtype
from triforce.model.config import ModelConfig
from triforce.model.kv_rows import kv_dtype
from triforce.ragged import columns, ints

MAX_NARROW_WIDTH = 80
"""Most queries per row of a pass that is not prefill. Prefill needs no mass, and may use torch's fused attention."""


class TorchKV:
    width_independent = False
    """False, as torch's matrix products do not guarantee it."""
    searches = False

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        dtype: DType,
        device: str = "cpu",
        layers: int | None = None,
        window_pages: int = 0,
    ) -> None:
        self.config = config
        self._rope = RopeTensors(config.rope, device)
        logits_LH = config.attention_sink_logits_LH
        self._attention_sink_logits_LH = None if logits_LH is None else tensor_of(logits_LH, device)
        self.xp = array_api_compat.torch
        self.device = device
        self.dtype = torch_dtype(dtype)
        rows = torch_dtype(kv_dtype(config, dtype))
        windowed = [bool(window and window_pages) for window in config.windows]
        windowed = windowed if layers is None else [False] * layers

        def memory(layers: int, pages: int) -> Tensor:
            # Zeros: hidden keys have weight 0 here, and 0 times uninitialised memory may be NaN.
            return allocate((layers, config.kv_heads, (pages + 1) * PAGE, config.row_size), rows, device).zero_()

        self.keys_LGSD, self.values_LGSD = (memory(windowed.count(False), pages) for _ in range(2))
        """Keys and values of all layers; with `window_pages`, only of layers without a window."""
        window_memory = (memory(windowed.count(True), window_pages) for _ in range(2))
        memories = (self.keys_LGSD, self.values_LGSD), window_memory
        self._kv_L: list[KeysValues] = in_order(windowed, *(list(zip(*kv, strict=True)) for kv in memories))

    def array(self, source: Array) -> Tensor:
        return tensor_of(source, self.device) if isinstance(source, np.ndarray) else source

    def numbers(self, rows_R: Tensor) -> Tensor:
        return numbers(rows_R).float()

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return allocate(shape, self.dtype, self.device)

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        tables_L = batch.layer_tables()
        config = self.config
        dtype = self.dtype
        head = self._head
        first_table = tables_L[0]
        rotation_indices = config.rotations
        slots_L = slots_of(config, tables_L, width)
        positions_N = on_device(columns(ints(batch.positions), width).flatten(), self.keys_LGSD.device)
        rotations = {index: self._rope.cos_sin(positions_N, index) for index in {*rotation_indices}}
        sinks_N = positions_N.clamp_max(first_table.sinks + first_table.window - 1)
        to_sinks = (
            {index: self._rope.cos_sin(sinks_N, index) for index in {*rotation_indices}}
            if first_table.sinks and first_table.window
            else None
        )

        def attention(layer: int, q_BTHD: Array, k_BTGD: Array, v_BTGD: Array) -> tuple[Tensor, Array, Tensor]:
            on_host = isinstance(q_BTHD, np.ndarray)  # a native model, whose memory has units smaller than a page
            q_BTHD, k_BTGD, v_BTGD = (tensor_of(x) if on_host else x for x in (q_BTHD, k_BTGD, v_BTGD))
            rotation = rotations[rotation_indices[layer]]
            keys_values = (head(rotated(k_BTGD, rotation)), head(v_BTGD))
            round_rows = rounded if self.config.kv_int8 else lambda x_GND: x_GND.to(dtype)
            self.write(layer, slots_L[layer], *(round_rows(x.flatten(0, 1).transpose(0, 1)) for x in keys_values))
            q_sinks_BTHD = head(rotated(q_BTHD, to_sinks[rotation_indices[layer]])).to(dtype) if to_sinks else None
            q_BTHD = head(rotated(q_BTHD, rotation)).to(dtype)
            mixed_BTHD, mass_BGU = self._attend(layer, q_BTHD, tables_L[layer], batch.return_mass, q_sinks_BTHD)
            attn_out_BTHD = head(mixed_BTHD).to(dtype)
            return q_BTHD, to_host(attn_out_BTHD) if on_host else attn_out_BTHD, mass_BGU

        return attention

    def write(self, layer: int, slots_N: Tensor, k_GND: Array, v_GND: Array) -> None:
        for rows_GSD, x_GND in zip(self._kv_L[layer], (k_GND, v_GND), strict=True):
            rows_GSD.index_copy_(1, slots_N, self.array(x_GND).to(rows_GSD.dtype))

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        keys_GSD, values_GSD = self._kv_L[layer]
        return keys_GSD.index_select(1, slots_N), values_GSD.index_select(1, slots_N)

    def view(self, layer: int, first_slot: int, count: int) -> KeysValues:
        keys_GSD, values_GSD = self._kv_L[layer]
        return keys_GSD[:, first_slot : first_slot + count], values_GSD[:, first_slot : first_slot + count]

    def attend(self, layer: int, q_BTHD: Tensor, page_table: PageTable) -> Tensor:
        return self._head(self._attend(layer, q_BTHD, page_table)[0]).to(q_BTHD.dtype)

    def _head(self, x_D: Tensor) -> Tensor:
        """Rotate heads by Hadamard matrices if int8 KV rotates them, else return them unchanged; its own inverse."""
        return rotated_head(x_D) if self.config.rotates_heads else x_D

    def _attend(
        self,
        layer: int,
        q_BTHD: Tensor,
        page_table: PageTable,
        return_mass: bool = False,
        q_sinks_BTHD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        kv = self._kv_L[layer]
        attention_sink_logits_LH = self._attention_sink_logits_LH
        attention_sink_logits_H = None if attention_sink_logits_LH is None else attention_sink_logits_LH[layer]
        settings = ScoreSettings(self.config.architecture.score_cap, attention_sink_logits_H)
        if self.config.kv_int8:
            q_BTHD = rounded_queries(q_BTHD)
            q_sinks_BTHD = None if q_sinks_BTHD is None else rounded_queries(q_sinks_BTHD)
        return attend_tables(q_BTHD, kv, page_table, return_mass, q_sinks_BTHD, settings)


class ScoreSettings(NamedTuple):
    """Arguments of `attend` that depend on a layer of the model."""

    cap: float = 0.0
    attention_sink_logits_H: Tensor | None = None

    @property
    def are_default(self) -> bool:
        """Whether all arguments have their defaults."""
        return self.cap == 0 and self.attention_sink_logits_H is None


DEFAULT_SETTINGS = ScoreSettings()


def attend_tables(
    q_BTHD: Tensor,
    kv: KeysValues,
    page_table: PageTable,
    return_mass: bool = False,
    q_sinks_BTHD: Tensor | None = None,
    settings: ScoreSettings = DEFAULT_SETTINGS,
) -> tuple[Tensor, Tensor]:
    """Return mixed values and mass as a `LayerAttention` does. `q_sinks`: queries rotated for the sinks, or None."""
    G = len(kv[0])
    U = page_table.units.shape[-1]
    attn_out_BTHD = torch.zeros_like(q_BTHD)
    mass_BGU = torch.zeros(len(q_BTHD), G, U, device=q_BTHD.device) if return_mass else q_BTHD.new_empty(0)
    for b, (start, count) in enumerate(zip(page_table.starts, page_table.counts, strict=True)):
        if count == 0:
            continue
        k_GKD, v_GKD = map(numbers, _visible(*kv, page_table.units[b], page_table.unit, start + count))
        q_THD = q_BTHD[b, :count].to(k_GKD.dtype)
        if count > MAX_NARROW_WIDTH and not (return_mass or page_table.window) and settings.are_default:
            attn_out_BTHD[b, :count] = attend_causal(q_THD, k_GKD, v_GKD)
            continue
        q_sinks_THD = q_sinks_BTHD[b, :count].to(k_GKD.dtype) if q_sinks_BTHD is not None else None
        at_once = count if return_mass else MAX_NARROW_WIDTH  # bounds the scores in memory
        for part in (slice(first_query, min(first_query + at_once, count)) for first_query in range(0, count, at_once)):
            visible = slice(start + part.stop)
            own_q_sinks_THD = None if q_sinks_THD is None else q_sinks_THD[part]
            attn_out_BTHD[b, part], mass_GK = attend(
                q_THD[part], k_GKD[:, visible], v_GKD[:, visible], return_mass, own_q_sinks_THD, page_table.sinks,
                page_table.window, settings.attention_sink_logits_H, settings.cap,
            )  # fmt: skip
        if return_mass:
            padded_GK = torch.nn.functional.pad(mass_GK, (0, -mass_GK.shape[1] % page_table.unit))
            units_GU = padded_GK.view(G, -1, page_table.unit).sum(2)
            mass_BGU[b, :, : units_GU.shape[1]] = units_GU
    return attn_out_BTHD, mass_BGU


def _visible(k_GSD: Tensor, v_GSD: Tensor, units: Tensor, unit: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `length` keys and values of a list, each (G, K, D); a slice where units are consecutive."""
    units = units[..., : -(-length // unit)].long()
    if units.ndim == 1 and bool((units.diff() == 1).all()):
        first_slot = int(units[0]) * unit
        return k_GSD[:, first_slot : first_slot + length], v_GSD[:, first_slot : first_slot + length]
    slots = (units[..., None] * unit + torch.arange(unit, device=units.device)).flatten(-2)[..., :length]
    if slots.ndim == 1:
        return k_GSD.index_select(1, slots), v_GSD.index_select(1, slots)
    return gather(k_GSD, slots), gather(v_GSD, slots)


def rotated(q_BTHD: Tensor, rotation: Rotation) -> Tensor:
    """Return queries or keys of the same shape, each token's rotated by its position."""
    return rotate(q_BTHD.flatten(0, 1), rotation).view(q_BTHD.shape)


def gather(memory_GSD: Tensor, slots_GK: Tensor) -> Tensor:
    """Return each KV head's rows at its own slots, (G, K, D)."""
    G, S, D = memory_GSD.shape
    flat_GK = slots_GK + torch.arange(G, device=slots_GK.device)[:, None] * S
    return memory_GSD.reshape(G * S, D).index_select(0, flat_GK.flatten()).view(G, -1, D)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Allocate keys or values of this shape. Raises CacheError with the bytes of both if memory is short."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch has no narrower class for a CPU
        raise kv_memory_error(2 * prod(shape) * dtype.itemsize) from error
