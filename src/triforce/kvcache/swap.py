"""Rows whose pages others need for a while: what they hold is copied to host memory, and later into other pages.

Shape suffixes: N tokens, L layers, G KV heads, U units (see `backends.PageTable`), D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce.backends.kernel_api import KVBackend
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.observation import AttentionObservation


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """A row of an exact view: K and V of its committed tokens for each layer, and what it saw last."""

    length: int
    layers: list[tuple[Tensor, Tensor]]
    observation: AttentionObservation


def taken(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copies on the host of K and V, each (G, N, D), of each layer."""
    return [(keys_GND.to("cpu", copy=True), values_GND.to("cpu", copy=True)) for keys_GND, values_GND in pairs]


def put_back(memory: KVBackend, slots_N: Tensor, layers: list[tuple[Tensor, Tensor]]) -> None:
    """Write what was taken into slots of this memory, bit for bit."""
    for layer, (keys_GND, values_GND) in enumerate(layers):
        memory.write(layer, slots_N, keys_GND.to(slots_N.device), values_GND.to(slots_N.device))


def take_row(pool: PagePool, row: int, observation: AttentionObservation) -> SwappedKV:
    """Return what a row of a pool holds."""
    length = int(pool.lengths_B[row])
    layers = taken(pool.span(layer, row, 0, length) for layer in range(pool.config.layers))
    return SwappedKV(length, layers, observation)


def put_row_back(pool: PagePool, row: int, seen: SwappedKV) -> None:
    """Write what was taken into a fresh row, whose pages are reserved."""
    put_back(pool.kv, pool.slots(row, 0, seen.length), seen.layers)
    pool.lengths_B[row] = seen.length


def places(units: Tensor, row_U: Tensor) -> Tensor:
    """Return where these units stand in their row, counted from its start: their shape, int64."""
    place = torch.zeros(int(row_U.max()) + 1, dtype=torch.long, device=row_U.device)
    place[row_U.long()] = torch.arange(len(row_U), device=row_U.device)
    return place[units.long()]
