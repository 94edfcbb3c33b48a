"""KV memory on the torch path: right on any device, for any dtype, head size and unit.

A head's pages lie behind one another, so that consecutive pages are a plain slice. Shape suffixes as in contract.py;
L layers, S slots, K keys of a row.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from triforce.config import ModelConfig
from triforce.errors import CacheError
from triforce.kernels.contract import PAGE, Lists, Rotation
from triforce.kernels.reference import attend, attend_causal
from triforce.rope import rotate

WIDE = 80
"""More queries of a row are prefill, which needs neither mass nor a window, and takes torch's fused attention."""


class PlainMemory:
    width_independent = False
    """torch's matrix products do not promise it."""

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        shape = (config.layers, config.kv_heads, (pages + 1) * PAGE, config.head_dim)
        # Zeros: what a window hides has weight 0 here, and 0 times whatever lay in the memory may be NaN.
        self.keys_LGSD, self.values_LGSD = (allocate(shape, dtype, device).zero_() for _ in range(2))

    def write(
        self,
        layer: int,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        rotation: Rotation,
        slots_N: Tensor,
        to_sinks: Rotation | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = self.keys_LGSD.dtype
        k_NGD = rotate(k_NGD, rotation).to(dtype)
        self.put(layer, slots_N, k_NGD.transpose(0, 1), v_NGD.to(dtype).transpose(0, 1))
        return rotate(q_NHD, rotation).to(dtype), rotate(q_NHD, to_sinks).to(dtype) if to_sinks else None

    def put(self, layer: int, slots_N: Tensor, k_GND: Tensor, v_GND: Tensor) -> None:
        self.keys_LGSD[layer].index_copy_(1, slots_N, k_GND)
        self.values_LGSD[layer].index_copy_(1, slots_N, v_GND)

    def get(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys_LGSD[layer].index_select(1, slots_N), self.values_LGSD[layer].index_select(1, slots_N)

    def run(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self.keys_LGSD[layer, :, first : first + count], self.values_LGSD[layer, :, first : first + count]

    def attend(
        self, layer: int, q_BTHD: Tensor, lists: Lists, weigh: bool = False, q_sinks_BTHD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        G, U = self.keys_LGSD.shape[1], lists.units.shape[-1]
        mixed_BTHD = torch.zeros_like(q_BTHD)
        mass_BGU = torch.zeros(len(q_BTHD), G, U, device=q_BTHD.device) if weigh else q_BTHD.new_empty(0)
        for b, (start, count) in enumerate(zip(lists.starts, lists.counts, strict=True)):
            if count == 0:
                continue
            k_GKD, v_GKD = self._seen(layer, lists.units[b], lists.unit, start + count)
            q_THD = q_BTHD[b, :count]
            if count > WIDE and not (weigh or lists.window):
                mixed_BTHD[b, :count] = attend_causal(q_THD, k_GKD, v_GKD)
                continue
            q_sinks_THD = q_sinks_BTHD[b, :count] if q_sinks_BTHD is not None else None
            mixed_BTHD[b, :count], mass_GK = attend(q_THD, k_GKD, v_GKD, weigh, q_sinks_THD, lists.sinks, lists.window)
            if weigh:
                whole_GK = torch.nn.functional.pad(mass_GK, (0, -mass_GK.shape[1] % lists.unit))
                units_GU = whole_GK.view(G, -1, lists.unit).sum(2)
                mass_BGU[b, :, : units_GU.shape[1]] = units_GU
        return mixed_BTHD, mass_BGU

    def _seen(self, layer: int, units: Tensor, unit: int, length: int) -> tuple[Tensor, Tensor]:
        """The first keys and values of a list, each (G, K, D); a plain slice where its units are consecutive."""
        units = units[..., : -(-length // unit)].long()
        if units.ndim == 1 and bool((units.diff() == 1).all()):
            return self.run(layer, int(units[0]) * unit, length)
        slots = (units[..., None] * unit + torch.arange(unit, device=units.device)).flatten(-2)[..., :length]
        if slots.ndim == 1:
            return self.get(layer, slots)
        return gather(self.keys_LGSD[layer], slots), gather(self.values_LGSD[layer], slots)


def gather(memory_GSD: Tensor, slots_GK: Tensor) -> Tensor:
    """Each KV head's own rows, (G, K, D)."""
    G, S, D = memory_GSD.shape
    flat_GK = slots_GK + torch.arange(G, device=slots_GK.device)[:, None] * S
    return memory_GSD.reshape(G * S, D).index_select(0, flat_GK.flatten()).view(G, -1, D)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory for keys or values; its twin is assumed to be as large. Raises CacheError when there is not enough."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch has no narrower one for a CPU
        raise CacheError(
            f"the KV cache needs {2 * prod(shape) * dtype.itemsize / 2**30:.1f} GiB, more than there is. "
            "Use a smaller max_tokens, a shorter prompt, fewer rows at once, --context, or --dtype bfloat16"
        ) from error
