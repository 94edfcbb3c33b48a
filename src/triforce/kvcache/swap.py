"""Rows whose pages others need for a while: what they hold is copied to host memory, and later into other pages.

Shape suffixes: N tokens, L layers, G KV heads, U units (see `backends.PageTable`), D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from triforce.backends.kernel_api import KVBackend


def taken(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copies on the host of K and V, each (G, N, D), of each layer."""
    return [(keys_GND.to("cpu", copy=True), values_GND.to("cpu", copy=True)) for keys_GND, values_GND in pairs]


def put_back(memory: KVBackend, slots_N: Tensor, layers: list[tuple[Tensor, Tensor]]) -> None:
    """Write what was taken into slots of this memory, bit for bit."""
    for layer, (keys_GND, values_GND) in enumerate(layers):
        memory.write(layer, slots_N, keys_GND.to(slots_N.device), values_GND.to(slots_N.device))


def places(units: Tensor, row_U: Tensor) -> Tensor:
    """Return where these units stand in their row, counted from its start: their shape, int64."""
    place = torch.zeros(int(row_U.max()) + 1, dtype=torch.long, device=row_U.device)
    place[row_U.long()] = torch.arange(len(row_U), device=row_U.device)
    return place[units.long()]
