"""A pass over native KV memory layer by layer, for models that have something to do in between.

Each kernel gives a row the bits that it has in a pass of one call (`tests/kernels/test_decoder.py`). Shape suffixes as
in contract.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triforce.kernels.contract import Model, Outcome, Pass
from triforce.kernels.layers import layer_by_layer
from triforce.kernels.plain_memory import slots
from triforce.rope import Rope
from triforce.shapes import columns, ints

if TYPE_CHECKING:
    from triforce.kernels.native_memory import NativeMemory


def by_layers(memory: NativeMemory, model: Model, ids_BT: Tensor, at_BJ: Tensor | None, this: Pass) -> Outcome:
    """As `Memory.forward`."""
    (B, T), lists_L, config = ids_BT.shape, this.lists(), memory.config
    first, tables = lists_L[0], rotations(config.rope, this, T)
    positions_N = torch.from_numpy(columns(ints(this.positions), T).flatten())
    to_sinks_N = positions_N.clamp_max(first.sinks + first.window - 1)
    slots_N, queries, masses = slots(first, T), [], []

    def attend(layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        turned_BTHD = torch.empty(B, T, config.heads, config.head_dim, dtype=memory.dtype)
        q_sinks_BTHD = torch.empty_like(turned_BTHD) if first.window else None
        sinks = (to_sinks_N, q_sinks_BTHD.flatten(0, 1)) if q_sinks_BTHD is not None else ()
        q_NQ, k_NP, v_NP = (x.flatten(2).flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
        turned_NHD = turned_BTHD.flatten(0, 1)
        memory._layers[layer].write(q_NQ, k_NP, v_NP, *tables, positions_N, slots_N, turned_NHD, *sinks)
        mixed_BTHD, mass_BGU = memory.attend(layer, turned_BTHD, lists_L[layer], this.weigh, q_sinks_BTHD)
        queries.append(turned_BTHD)
        masses.append(mass_BGU)
        return mixed_BTHD

    logits_BJV = layer_by_layer(model, ids_BT, at_BJ, attend)
    queries_LBTHD = torch.stack(queries) if this.observe else None
    return Outcome(logits_BJV, queries_LBTHD, torch.stack(masses) if this.weigh else None)


def rotations(rope: Rope, this: Pass, T: int) -> tuple[Tensor, Tensor]:
    """What a pass looks up: padding is turned to 0, and a query meets the sinks from the end of its window at most."""
    lists = this.views[0][1]
    return rope.tables((0, lists.sinks + lists.window, *this.positions), T)
