"""KV memory on the torch path: correct on any device, for any dtype, head size and unit.

A head's pages are contiguous, so that consecutive pages are a plain slice. For int8 KV, D is the size of a row with its
scale. Shape suffixes as in kernel_api.py; L layers, S slots, K keys of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE, Device, ForwardBatch, KeysValues, LayerAttention, PageTable, Rotation
from triforce.backends.kv_rows import kv_dtype, numbers, rotated_head, rounded, rounded_queries
from triforce.backends.torch.attention import attend, attend_causal
from triforce.errors import CacheError, argument
from triforce.model.config import ModelConfig
from triforce.model.rope import rotate
from triforce.ragged import columns, ints

Part = TypeVar("Part")
WIDE = 80
"""Most queries of a row outside prefill. Prefill needs no mass, and uses torch's fused attention where possible."""


class TorchKV:
    width_independent = False
    """False, as torch's matrix products do not guarantee it."""
    searches = False

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        dtype: torch.dtype,
        device: Device = "cpu",
        layers: int | None = None,
        window_pages: int = 0,
    ) -> None:
        self.config = config
        self.dtype = dtype
        rows = kv_dtype(config, dtype)
        windowed = [bool(window and window_pages) for window in config.windows]
        windowed = windowed if layers is None else [False] * layers

        def memory(layers: int, pages: int) -> Tensor:
            # Zeros: hidden keys have weight 0 here, and 0 times uninitialised memory may be NaN.
            return allocate((layers, config.kv_heads, (pages + 1) * PAGE, config.row_size), rows, device).zero_()

        self.keys_LGSD, self.values_LGSD = (memory(windowed.count(False), pages) for _ in range(2))
        """Keys and values of all layers; with `window_pages`, only of layers without a window."""
        window_memory = (memory(windowed.count(True), window_pages) for _ in range(2))
        kinds = (self.keys_LGSD, self.values_LGSD), window_memory
        self._kv_L: list[KeysValues] = in_order(windowed, *(list(zip(*kv, strict=True)) for kv in kinds))

    def layer_attention(self, batch: ForwardBatch, width: int) -> LayerAttention:
        lists_L = batch.lists()
        config = self.config
        dtype = self.dtype
        head = self._head
        first_table = lists_L[0]
        kinds = config.rotations
        slots_L = slots_of(config, lists_L, width)
        positions_N = torch.from_numpy(columns(ints(batch.positions), width).flatten()).to(self.keys_LGSD.device)
        rotations = {kind: config.rope.cos_sin(positions_N, kind) for kind in {*kinds}}
        sinks_N = positions_N.clamp_max(first_table.sinks + first_table.window - 1)
        to_sinks = (
            {kind: config.rope.cos_sin(sinks_N, kind) for kind in {*kinds}}
            if first_table.sinks and first_table.window
            else None
        )

        def attention(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rotation = rotations[kinds[layer]]
            keys_values = (head(rotated(k_BTGD, rotation)), head(v_BTGD))
            round_rows = rounded if self.config.kv_int8 else lambda x_GND: x_GND.to(dtype)
            self.write(layer, slots_L[layer], *(round_rows(x.flatten(0, 1).transpose(0, 1)) for x in keys_values))
            q_sinks_BTHD = head(rotated(q_BTHD, to_sinks[kinds[layer]])).to(dtype) if to_sinks else None
            q_BTHD = head(rotated(q_BTHD, rotation)).to(dtype)
            mixed_BTHD, mass_BGU = self._attend(layer, q_BTHD, lists_L[layer], batch.return_mass, q_sinks_BTHD)
            return q_BTHD, head(mixed_BTHD).to(dtype), mass_BGU

        return attention

    def write(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        keys_GSD, values_GSD = self._kv_L[layer]
        keys_GSD.index_copy_(1, slots_N, k_GND.to(keys_GSD.dtype))
        values_GSD.index_copy_(1, slots_N, v_GND.to(values_GSD.dtype))

    def read(self, layer: int, slots_N: Tensor) -> KeysValues:
        keys_GSD, values_GSD = self._kv_L[layer]
        return keys_GSD.index_select(1, slots_N), values_GSD.index_select(1, slots_N)

    def view(self, layer: int, first_slot: int, count: int) -> KeysValues:
        keys_GSD, values_GSD = self._kv_L[layer]
        return keys_GSD[:, first_slot : first_slot + count], values_GSD[:, first_slot : first_slot + count]

    def attend(self, layer: int, q_BTHD: Tensor, lists: PageTable) -> Tensor:
        return self._head(self._attend(layer, q_BTHD, lists)[0]).to(q_BTHD.dtype)

    def _head(self, x_D: Tensor) -> Tensor:
        """Rotate heads for int8 rounding, or back, as the rotation is its own inverse; other heads as they are."""
        return rotated_head(x_D) if self.config.rotates_heads else x_D

    def _attend(
        self,
        layer: int,
        q_BTHD: Tensor,
        lists: PageTable,
        return_mass: bool = False,
        q_sinks_BTHD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        kv = self._kv_L[layer]
        attention_sink_logits_LH = self.config.attention_sink_logits_LH
        attention_sink_logits_H = None if attention_sink_logits_LH is None else attention_sink_logits_LH[layer]
        rules = Rules(self.config.architecture.score_cap, attention_sink_logits_H)
        if self.config.kv_int8:
            q_BTHD = rounded_queries(q_BTHD)
            q_sinks_BTHD = None if q_sinks_BTHD is None else rounded_queries(q_sinks_BTHD)
        return attend_lists(q_BTHD, kv, lists, return_mass, q_sinks_BTHD, rules)


class Rules(NamedTuple):
    """Arguments of `attend` that depend on a layer of the model."""

    cap: float = 0.0
    attention_sink_logits_H: Tensor | None = None

    @property
    def are_default(self) -> bool:
        """Whether all arguments have their defaults."""
        return self.cap == 0 and self.attention_sink_logits_H is None


PLAIN = Rules()


def attend_lists(
    q_BTHD: Tensor,
    kv: KeysValues,
    lists: PageTable,
    return_mass: bool = False,
    q_sinks_BTHD: Tensor | None = None,
    rules: Rules = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return mixed values and mass as a `LayerAttention` does. `q_sinks`: queries rotated for the sinks, if given."""
    G = len(kv[0])
    U = lists.units.shape[-1]
    attn_out_BTHD = torch.zeros_like(q_BTHD)
    mass_BGU = torch.zeros(len(q_BTHD), G, U, device=q_BTHD.device) if return_mass else q_BTHD.new_empty(0)
    for b, (start, count) in enumerate(zip(lists.starts, lists.counts, strict=True)):
        if count == 0:
            continue
        k_GKD, v_GKD = map(numbers, _visible(*kv, lists.units[b], lists.unit, start + count))
        q_THD = q_BTHD[b, :count].to(k_GKD.dtype)
        if count > WIDE and not (return_mass or lists.window) and rules.are_default:
            attn_out_BTHD[b, :count] = attend_causal(q_THD, k_GKD, v_GKD)
            continue
        q_sinks_THD = q_sinks_BTHD[b, :count].to(k_GKD.dtype) if q_sinks_BTHD is not None else None
        at_once = count if return_mass else WIDE  # bounds the scores in memory
        for part in (slice(first_query, min(first_query + at_once, count)) for first_query in range(0, count, at_once)):
            visible = slice(start + part.stop)
            own_q_sinks_THD = None if q_sinks_THD is None else q_sinks_THD[part]
            attn_out_BTHD[b, part], mass_GK = attend(
                q_THD[part], k_GKD[:, visible], v_GKD[:, visible], return_mass, own_q_sinks_THD, lists.sinks,
                lists.window, rules.attention_sink_logits_H, rules.cap,
            )  # fmt: skip
        if return_mass:
            padded_GK = torch.nn.functional.pad(mass_GK, (0, -mass_GK.shape[1] % lists.unit))
            units_GU = padded_GK.view(G, -1, lists.unit).sum(2)
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


def slots_of(config: ModelConfig, lists: Sequence[PageTable], width: int, first_layer: int = 0) -> list[Tensor]:
    """Return the slots (N) of a pass's tokens in each layer from `first_layer` on; window layers may differ."""
    kinds = [bool(window) for window in config.windows[first_layer : first_layer + len(lists)]]
    slots_by_kind = {kind: slots(lists[kinds.index(kind)], width) for kind in {*kinds}}
    return [slots_by_kind[kind] for kind in kinds]


def in_order(kinds: Sequence[bool], *parts: Sequence[Part]) -> list[Part]:
    """Merge parts in layer order. kinds: each layer's kind; parts: those of False layers, and of True layers."""
    iterators = [iter(part) for part in parts]
    return [next(iterators[kind]) for kind in kinds]


def slots(lists: PageTable, width: int) -> Tensor:
    """Return the slots (N) of a pass's tokens, which are the keys from `starts` on; padding gets the scratch page."""
    units_BU = lists.units if lists.units.ndim == 2 else lists.units[:, 0]
    padding_BT = (torch.arange(width) >= torch.tensor(lists.counts)[:, None]).to(units_BU.device)
    at_BT = torch.from_numpy(columns(ints(lists.starts), width)).to(units_BU.device)
    unit_BT = units_BU.gather(1, (at_BT // lists.unit).clamp_max(units_BU.shape[1] - 1))
    slots_BT = unit_BT * lists.unit + at_BT % lists.unit
    return slots_BT.masked_fill(padding_BT, 0).flatten()


def gather(memory_GSD: Tensor, slots_GK: Tensor) -> Tensor:
    """Return each KV head's rows at its own slots, (G, K, D)."""
    G, S, D = memory_GSD.shape
    flat_GK = slots_GK + torch.arange(G, device=slots_GK.device)[:, None] * S
    return memory_GSD.reshape(G * S, D).index_select(0, flat_GK.flatten()).view(G, -1, D)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> Tensor:
    """Allocate keys or values of this shape; errors count both. Raises CacheError where memory is short."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch has no narrower class for a CPU
        raise CacheError(
            f"the KV cache needs {2 * prod(shape) * dtype.itemsize / 2**30:.1f} GiB, more than there is. Use a smaller "
            f"max_tokens, a shorter prompt, fewer rows at once, {argument('context')}, "
            f"{argument('kv_offload', 'host')}, or {argument('dtype', 'bfloat16')}"
        ) from error
