"""Inputs of a captured pass: what changes lies in buffers that stay where they are, so that it can be replayed.

Passes are padded to the shapes of a few buckets: powers of two of rows, tokens a row, scored columns and units of a
list. All integers of a pass travel to the device in one copy; lists, which are there already, in one more each.
Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from triforce.backends.kernel_api import ForwardBatch


class ViewShape(NamedTuple):
    """Shape of what some layers see, without the integers: number, shape of their units, and `Lists`' settings."""

    layers: int
    units: tuple[int, ...]
    unit: int
    sinks: int
    window: int


@dataclass(frozen=True, slots=True)
class PassShape:
    """All that a pass's launches depend on; `columns` is J."""

    rows: int
    width: int
    columns: int
    views: tuple[ViewShape, ...]
    observe: bool
    return_mass: bool


def bucket(size: int, least: int = 1) -> int:
    """The smallest power of two that is neither below `size` nor below `least`; 0 for nothing."""
    return 1 << (max(size, least) - 1).bit_length() if size else 0


def shape_of(rows: int, width: int, columns: int, this: ForwardBatch, padded: bool) -> PassShape:
    """The shape at which a pass runs; as it is unless `padded`."""
    views = tuple(
        ViewShape(layers, tuple(lists.units.shape), lists.unit, lists.sinks, lists.window)
        for layers, lists in this.views
    )
    if not padded:
        return PassShape(rows, width, columns, views, this.observe, this.return_mass)
    rows, width = bucket(rows, this.least[0]), bucket(width, this.least[1])
    views = tuple(view._replace(units=_padded(view.units, rows)) for view in views)
    return PassShape(rows, width, bucket(columns, this.least[1]), views, this.observe, this.return_mass)


def _padded(units: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """(L, B, G, U), (B, G, U) or (B, U) with more rows and units."""
    *head, last = units
    head[-1 if len(units) == 2 else -2] = rows
    return (*head, bucket(last, 64))


class GraphInputs:
    """Buffers of one shape: ids, columns to score, positions, counts, and for each view its starts and units."""

    def __init__(self, shape: PassShape, device: torch.device) -> None:
        self.shape, B = shape, shape.rows
        sizes = [(B, shape.width), (B, shape.columns), (B,), (B,), *[(B,)] * len(shape.views)]
        ends = list(accumulate(map(prod, sizes)))
        self._host = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        self._hosts, parts = (
            [whole[end - prod(size) : end].view(size) for size, end in zip(sizes, ends, strict=True)]
            for whole in (self._host, self._device)
        )
        self.ids_BT, self.at_BJ, self.positions_B, self.counts_B, *self.starts = parts
        self.units = [torch.zeros(view.units, dtype=torch.int32, device=device) for view in shape.views]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, ids_BT: Tensor, at_BJ: Tensor, this: ForwardBatch) -> None:
        """Take over one pass, whose shape fits; its padding has count 0."""
        if self._copied:
            self._copied.synchronize()  # the last pass's copy: long done, unless passes follow without sampling
        self._host.zero_()
        rows = [this.positions, this.views[0][1].counts, *(lists.starts for _, lists in this.views)]
        for to, values in zip(self._hosts, [ids_BT, at_BJ, *map(torch.tensor, rows)], strict=True):
            to[tuple(slice(size) for size in values.shape)] = values
        self._device.copy_(self._host, non_blocking=True)
        if self._copied:
            self._copied.record()
        for units, (_, lists) in zip(self.units, this.views, strict=True):
            units[tuple(slice(size) for size in lists.units.shape)] = lists.units

    def lists(self) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Return, for each layer, its units (B, U) or (B, G, U), starts, and settings."""
        found = []
        for view, units, starts_B in zip(self.shape.views, self.units, self.starts, strict=True):
            each = units.unbind(0) if units.ndim == 4 else [units] * view.layers
            found += [(one, starts_B, view) for one in each]
        return found
