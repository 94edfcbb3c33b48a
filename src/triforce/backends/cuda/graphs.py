"""CUDA graphs: a function over buffers that stay where they are is captured once and then replayed.

Elsewhere it is simply called, so that the same code runs on a CPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from weakref import WeakSet

import torch

from triforce.backends.kernel_api import ForwardOutput

MOST = 64
"""Graphs that are kept; the one that was longest unused makes room."""


_all: WeakSet[Graphs] = WeakSet()


def forget() -> None:
    """All graphs of this process: ranks must, before they leave, as NCCL waits for graphs that hold its copies."""
    for graphs in list(_all):
        graphs.clear()


def captured() -> int:
    """Count the graphs of this process: where a pass adds one, its time is not that of such a pass."""
    return sum(graphs.captured for graphs in _all)


class Graphs:
    """Captured passes of one memory, by what they depend on. They share their working memory, as one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._known: OrderedDict[Hashable, Replay] = OrderedDict()
        _all.add(self)

    def get(self, key: Hashable, make: Callable[[], Replay]) -> Replay:
        """Return what was captured for `key`, or make it."""
        if key not in self._known and len(self._known) >= MOST:
            self._known.popitem(last=False)
        replay = self._known.pop(key, None) or make()
        self._known[key] = replay
        return replay

    def clear(self) -> None:
        """Forget all: something that they refer to has moved."""
        self._known.clear()

    def run(self, replay: Replay, call: Callable[[], ForwardOutput]) -> ForwardOutput:
        """One pass, `call` the first time; what it gives is overwritten by the next one."""
        if not self._captures:
            return call()
        if replay.graph is None:
            replay.graph, replay.outcome = self._capture(call)
        replay.graph.replay()
        assert replay.outcome
        return replay.outcome

    @property
    def captured(self) -> int:
        """Count the kept ones that were captured."""
        return sum(replay.graph is not None for replay in self._known.values())

    def _capture(self, call: Callable[[], ForwardOutput]) -> tuple[torch.cuda.CUDAGraph, ForwardOutput]:
        """First for real, as libraries set themselves up and kernels are compiled when they are first called."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = call()
        return graph, outcome


class Replay:
    """The graph of a pass, once it was captured. It refers to no memory, which so goes as soon as nobody needs it."""

    graph: torch.cuda.CUDAGraph | None = None
    outcome: ForwardOutput | None = None
