"""CUDA graphs: a function over buffers that stay where they are is captured once and then replayed.

Elsewhere it is simply called, so that the same code runs on a CPU. What changes from pass to pass lies in the buffers.
Passes are padded to the shapes of a few buckets: powers of two of rows, tokens a row, scored columns and units of a
list. All integers of a pass travel to the device in one copy; lists, which are there already, in one more each.
Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from triforce.backends.kernel_api import ForwardBatch
from triforce.ragged import Ints, ints

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
MOST = 64
"""Graphs that are kept; the one that was longest unused makes room."""


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
    if padded:
        rows = bucket(rows, this.least[0])
        width = bucket(width, this.least[1])
        columns = bucket(columns, this.least[1])
        views = tuple(view._replace(units=_padded(view.units, rows)) for view in views)
    return PassShape(rows, width, columns, views, this.observe, this.return_mass)


def _padded(units: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """(L, B, G, U), (B, G, U) or (B, U) with more rows and units."""
    *head, last = units
    head[-1 if len(units) == 2 else -2] = rows
    return (*head, bucket(last, 64))


@dataclass(eq=False)
class PassInputs:
    """Inputs of a pass on the device: ids, columns to score, positions, counts, each view's starts and units."""

    shape: PassShape
    ids_BT: Tensor
    at_BJ: Tensor
    positions_B: Tensor
    counts_B: Tensor
    starts: list[Tensor]
    units: list[Tensor]

    def lists(self) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Return, for each layer, its units (B, U) or (B, G, U), starts, and settings."""
        found = []
        for view, units, starts_B in zip(self.shape.views, self.units, self.starts, strict=True):
            each = units.unbind(0) if units.ndim == 4 else [units] * view.layers
            found += [(one, starts_B, view) for one in each]
        return found


class GraphInputs(PassInputs):
    """Inputs in buffers of one shape, and `more` integers of each row, `more_XB`."""

    def __init__(self, shape: PassShape, device: torch.device, more: int = 0) -> None:
        B = shape.rows
        sizes = [(B, shape.width), (B, shape.columns), (B,), (B,), *[(B,)] * len(shape.views), (more, B)]
        ends = list(accumulate(map(prod, sizes)))
        self._host = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        host, parts = (
            [whole[end - prod(size) : end].view(size) for size, end in zip(sizes, ends, strict=True)]
            for whole in (self._host, self._device)
        )
        self._hosts: list[Ints] = [part.numpy() for part in host]  # a few integers: with torch each costs its overhead
        ids_BT, at_BJ, positions_B, counts_B, *starts, self.more_XB = parts
        units = [torch.zeros(view.units, dtype=torch.int32, device=device) for view in shape.views]
        super().__init__(shape, ids_BT, at_BJ, positions_B, counts_B, starts, units)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, ids_BT: Tensor, at_BJ: Tensor, this: ForwardBatch, more_XB: Ints | None = None) -> None:
        """Take over one pass, whose shape fits; its padding has count 0. more_XB: of all rows, padding too."""
        if self._copied:
            self._copied.synchronize()  # the last pass's copy: long done, unless passes follow without sampling
        self._host.zero_()
        rows = [this.positions, this.views[0][1].counts, *(lists.starts for _, lists in this.views)]
        more_XB = self._hosts[-1] if more_XB is None else more_XB
        given = [ids_BT.cpu().numpy(), at_BJ.cpu().numpy(), *map(ints, rows), more_XB]
        for to, values in zip(self._hosts, given, strict=True):
            to[tuple(slice(size) for size in values.shape)] = values
        self._device.copy_(self._host, non_blocking=True)
        if self._copied:
            self._copied.record()
        for units, (_, lists) in zip(self.units, this.views, strict=True):
            units[tuple(slice(size) for size in lists.units.shape)] = lists.units


@dataclass(eq=False)
class Replay(Generic[I, O]):
    """The graph of a pass, once it was captured. It refers to no memory, which so goes as soon as nobody needs it."""

    inputs: I
    graph: torch.cuda.CUDAGraph | None = None
    outcome: O | None = None


_all: WeakSet[Graphs] = WeakSet()


def forget() -> None:
    """All graphs of this process: ranks must, before they leave, as NCCL waits for graphs that hold its copies."""
    for graphs in list(_all):
        graphs.kept.clear()


def captured() -> int:
    """Count the graphs of this process: where a pass adds one, its time is not that of such a pass."""
    return sum(replay.graph is not None for graphs in _all for replay in graphs.kept.values())


class Graphs:
    """Captured passes of one memory, by what they depend on.

    They share their working memory, as one runs at a time; torch gives it to captures of one stream alone. That is of
    this device, where torch's own for captures is of the one that came first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self.kept: OrderedDict[Hashable, Replay[Any, Any]] = OrderedDict()
        _all.add(self)

    def get(self, key: Hashable, make: Callable[[], Replay[I, O]]) -> Replay[I, O]:
        """Return what was captured for `key`, or make it."""
        if key not in self.kept and len(self.kept) >= MOST:
            self.kept.popitem(last=False)
        replay = self.kept.pop(key, None) or make()
        self.kept[key] = replay
        return replay

    def run(self, replay: Replay[I, O], call: Callable[[], O]) -> O:
        """One pass, `call` the first time; what it gives is overwritten by the next one."""
        if not self._captures:
            return call()
        if replay.graph is None:
            replay.graph, replay.outcome = self._capture(call)
        replay.graph.replay()
        assert replay.outcome is not None
        return replay.outcome

    def _capture(self, call: Callable[[], O]) -> tuple[torch.cuda.CUDAGraph, O]:
        """First for real, as libraries set themselves up and kernels are compiled when they are first called."""
        stream = self._stream
        usual = torch.cuda.current_stream(self._device)
        assert stream
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            call()
        usual.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            outcome = call()
        return graph, outcome
