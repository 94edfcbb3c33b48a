"""A pass over native KV memory layer by layer, for models that have something to do in between.

Each kernel gives a row the bits that it has in a pass of one call (`tests/backends/cpu/test_decoder.py`). Shape
suffixes as in interface.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from triforce.backends.interface import ForwardBatch, ForwardOutput, ModelBackend
from triforce.backends.layerwise import Attend, layer_by_layer
from triforce.backends.torch.kv import slots
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.ragged import columns, ints

Mix = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""What `KVBackend.attend` does, in a pass: from a layer, its rotated queries and perhaps others for the sinks."""


class LayerwiseKV(Protocol):
    """What such a pass asks of native KV memory."""

    config: ModelConfig
    dtype: torch.dtype

    def mixing(self, width: int, this: ForwardBatch, first: int) -> Mix:
        """How the layers of a pass attend, from `first` on."""

    def write(self, layer: int, *arguments: Any) -> None:
        """Rotate queries and keys, and put keys and values into their slots (`_native.Pages.write`)."""


def by_layers(
    memory: LayerwiseKV, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None, this: ForwardBatch
) -> ForwardOutput:
    """As `KVBackend.forward`."""
    queries: list[Tensor] = []
    masses: list[Tensor] = []
    attend = attending(memory, ids_BT.shape[1], this, 0, queries, masses)
    logits_BJV = layer_by_layer(model, ids_BT, at_BJ, attend)
    queries_LBTHD = torch.stack(queries) if this.observe else None
    return ForwardOutput(logits_BJV, queries_LBTHD, torch.stack(masses) if this.weigh else None)


def one_layer(
    memory: LayerwiseKV, model: ModelBackend, layer: int, ids_1T: Tensor, x_1TC: Tensor, this: ForwardBatch
) -> None:
    """The residual stream of some tokens goes through a layer; into the first one it comes from their ids."""
    if layer == 0:
        x_1TC[0] = model.embed(ids_1T[0])
    block, x_TC = model.blocks[layer], x_1TC[0]
    attend = attending(memory, len(x_TC), this, layer, [], [])
    mixed_1THD = attend(layer, *(each[None] for each in block.qkv(x_TC)))
    block.finish(x_TC, mixed_1THD[0].flatten(1))


def attending(
    memory: LayerwiseKV, T: int, this: ForwardBatch, first: int, queries: list[Tensor], masses: list[Tensor]
) -> Attend:
    """Attention of a pass, whose views are of the layers from `first` on; it adds to `queries` and `masses`."""
    lists_L, config = this.lists(), memory.config
    lists, tables, B = lists_L[0], rotations(config.rope, this, T), len(this.positions)
    positions_N = torch.from_numpy(columns(ints(this.positions), T).flatten())
    to_sinks_N = positions_N.clamp_max(lists.sinks + lists.window - 1)
    slots_N, mix = slots(lists, T), memory.mixing(T, this, first)

    def attend(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        turned_BTHD = torch.empty(B, T, config.heads, config.head_dim, dtype=memory.dtype)
        q_sinks_BTHD = torch.empty_like(turned_BTHD) if lists.window else None
        sinks = (to_sinks_N, q_sinks_BTHD.flatten(0, 1)) if q_sinks_BTHD is not None else ()
        q_NQ, k_NP, v_NP = (x.flatten(2).flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
        turned_NHD = turned_BTHD.flatten(0, 1)
        memory.write(layer, q_NQ, k_NP, v_NP, *tables, positions_N, slots_N, turned_NHD, *sinks)
        mixed_BTHD, mass_BGU = mix(layer, turned_BTHD, q_sinks_BTHD)
        queries.append(turned_BTHD)
        masses.append(mass_BGU)
        return mixed_BTHD

    return attend


def rotations(rope: Rope, this: ForwardBatch, T: int) -> tuple[Tensor, Tensor]:
    """What a pass looks up: padding is turned to 0, and a query meets the sinks from the end of its window at most."""
    lists = this.views[0][1]
    return rope.tables((0, lists.sinks + lists.window, *this.positions), T)
