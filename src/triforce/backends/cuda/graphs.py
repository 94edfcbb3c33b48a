"""CUDA graphs: a function over buffers at fixed addresses is captured once and then replayed.

On a CPU the function is called each time, so that the same code runs there. Values that change from pass to pass lie in
the buffers. Passes are padded to the shapes of a few buckets: powers of two of rows, tokens per row, scored columns and
units of a page table. One copy from the host brings all integers of a pass. The units of page tables are on the device
already; each page table takes one more copy, on the device. Shape suffixes as in kernel_api.py.
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

from triforce.arrays import is_gpu
from triforce.backends.cuda.splits import bucket
from triforce.backends.kernel_api import ForwardBatch
from triforce.ragged import Ints, ints

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
MAX_GRAPHS = 64
"""Most graphs of one memory; the least recently used graph is dropped."""


class ViewShape(NamedTuple):
    """Shape of some layers' page table, without its integers: layer count, shape of units, `PageTable`'s settings."""

    layers: int
    units: tuple[int, ...]
    unit: int
    sinks: int
    window: int


@dataclass(frozen=True, slots=True)
class PassShape:
    """Shape of a pass: all that its launches depend on; `columns` is J."""

    rows: int
    width: int
    columns: int
    views: tuple[ViewShape, ...]
    observe: bool
    return_mass: bool


def shape_of(rows: int, width: int, columns: int, batch: ForwardBatch, padded: bool) -> PassShape:
    """Return the shape at which a pass runs: its own, or that of its bucket if `padded`."""
    views = tuple(
        ViewShape(layers, tuple(page_table.units.shape), page_table.unit, page_table.sinks, page_table.window)
        for layers, page_table in batch.views
    )
    if padded:
        rows = bucket(rows, batch.min_shape[0])
        width = bucket(width, batch.min_shape[1])
        columns = bucket(columns, batch.min_shape[1])
        views = tuple(view._replace(units=_padded(view.units, rows)) for view in views)
    return PassShape(rows, width, columns, views, batch.observe, batch.return_mass)


def _padded(units: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Return the shape (L, B, G, U), (B, G, U) or (B, U) of units with padded rows and units."""
    *head, unit_count = units
    head[-1 if len(units) == 2 else -2] = rows
    return (*head, bucket(unit_count, 64))


@dataclass(eq=False)
class PassInputs:
    """Inputs of a pass on the device: ids, columns to score, positions, counts, and each view's starts and units."""

    shape: PassShape
    ids_BT: Tensor
    at_BJ: Tensor
    positions_B: Tensor
    counts_B: Tensor
    starts: list[Tensor]
    units: list[Tensor]

    def layer_tables(self) -> list[tuple[Tensor, Tensor, ViewShape]]:
        """Return each layer's units (B, U) or (B, G, U), starts, and settings."""
        layer_tables = []
        for view, units, starts_B in zip(self.shape.views, self.units, self.starts, strict=True):
            units_by_layer = units.unbind(0) if units.ndim == 4 else [units] * view.layers
            layer_tables += [(layer_units, starts_B, view) for layer_units in units_by_layer]
        return layer_tables


class GraphInputs(PassInputs):
    """Inputs in buffers of one shape, with `extra` more integers of each row in `extra_XB`."""

    def __init__(self, shape: PassShape, device: str, extra: int = 0) -> None:
        B = shape.rows
        sizes = [(B, shape.width), (B, shape.columns), (B,), (B,), *[(B,)] * len(shape.views), (extra, B)]
        ends = list(accumulate(map(prod, sizes)))
        self._host = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=is_gpu(device))
        self._device = torch.zeros(ends[-1], dtype=torch.int64, device=device)
        host_parts, parts = (
            [buffer[end - prod(size) : end].view(size) for size, end in zip(sizes, ends, strict=True)]
            for buffer in (self._host, self._device)
        )
        self._hosts: list[Ints] = [part.numpy() for part in host_parts]  # for few integers numpy has less overhead
        ids_BT, at_BJ, positions_B, counts_B, *starts, self.extra_XB = parts
        units = [torch.zeros(view.units, dtype=torch.int32, device=device) for view in shape.views]
        super().__init__(shape, ids_BT, at_BJ, positions_B, counts_B, starts, units)
        self._copied = torch.cuda.Event() if is_gpu(device) else None

    def fill(self, ids_BT: Ints, at_BJ: Ints, batch: ForwardBatch, extra_XB: Ints | None = None) -> None:
        """Copy a pass into the buffers, which it must fit. Padding has count 0. extra_XB covers padding rows, too."""
        if self._copied:
            # The host writes to the buffer only after its previous copy. After sampling, that copy is long done.
            self._copied.synchronize()
        self._host.zero_()
        rows = [batch.positions, batch.views[0][1].counts, *(page_table.starts for _, page_table in batch.views)]
        extra_XB = self._hosts[-1] if extra_XB is None else extra_XB
        pass_values = [ids_BT, at_BJ, *map(ints, rows), extra_XB]
        for target, values in zip(self._hosts, pass_values, strict=True):
            target[tuple(slice(size) for size in values.shape)] = values
        self._device.copy_(self._host, non_blocking=True)
        if self._copied:
            self._copied.record()
        for units, (_, page_table) in zip(self.units, batch.views, strict=True):
            units[tuple(slice(size) for size in page_table.units.shape)] = page_table.units


@dataclass(eq=False)
class Replay(Generic[I, O]):
    """Inputs and graph of a pass; `graph` is None before the capture.

    A replay holds no reference to the KV memory, so that the memory is freed when its last user drops it.
    """

    inputs: I
    graph: torch.cuda.CUDAGraph | None = None
    output: O | None = None


_instances: WeakSet[Graphs] = WeakSet()


def clear_graphs() -> None:
    """Drop all graphs of this process.

    Ranks must call it before their group ends, because NCCL waits for graphs that hold its copies.
    """
    for graphs in list(_instances):
        graphs.replays.clear()


def captured_graphs() -> int:
    """Return the number of graphs of this process: a pass that adds a graph takes longer than its replays."""
    return sum(replay.graph is not None for graphs in _instances for replay in graphs.replays.values())


class Graphs:
    """Captured passes of one KV memory, by their shape.

    All captures are on one stream, because torch shares working memory only among captures on the same stream; one pass
    runs at a time. The stream is made on `device`: torch's default capture stream is on the device of the process's
    first capture.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._captures = is_gpu(device)
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self.replays: OrderedDict[Hashable, Replay[Any, Any]] = OrderedDict()
        _instances.add(self)

    def get(self, key: Hashable, make: Callable[[], Replay[I, O]]) -> Replay[I, O]:
        """Return the replay of `key`, made if there is none."""
        if key not in self.replays and len(self.replays) >= MAX_GRAPHS:
            self.replays.popitem(last=False)
        replay = self.replays.pop(key, None) or make()
        self.replays[key] = replay
        return replay

    def run(self, replay: Replay[I, O], call: Callable[[], O]) -> O:
        """Run one pass, captured from `call` the first time; the next pass overwrites the returned output."""
        if not self._captures:
            return call()
        if replay.graph is None:
            replay.graph, replay.output = self._capture(call)
        replay.graph.replay()
        assert replay.output is not None
        return replay.output

    def _capture(self, call: Callable[[], O]) -> tuple[torch.cuda.CUDAGraph, O]:
        """Call once, because a first call sets up libraries and compiles kernels; capture; return graph and output."""
        stream = self._stream
        compute_stream = torch.cuda.current_stream(self._device)
        assert stream
        stream.wait_stream(compute_stream)
        with torch.cuda.stream(stream):
            call()
        compute_stream.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = call()
        return graph, output
