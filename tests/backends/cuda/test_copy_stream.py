"""A copy never overwrites a buffer that is still read, and no kernel reads a buffer before its copy is complete.

On a CPU all work is synchronous, so the test records which queue waits for which: two queues, each with both clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch import Tensor

import triforce.backends.cuda.offload.kv
from tests.helpers.cuda import paired_pools, torch_kernels
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.backends.cuda import kv
from triforce.backends.cuda.offload import frames, residency
from triforce.backends.cuda.offload.frames import Copies
from triforce.bench import shapes

MAIN, LANE = 0, 1
Clock = tuple[int, int]


class Watch:
    """A copy stream that records which queue touches which buffer, or which layer of the store, and when."""

    def __init__(self) -> None:
        self.clocks: list[Clock] = [(0, 0), (0, 0)]
        self.touched: dict[tuple[int, int], list[tuple[int, Clock, bool]]] = {}
        self.regions: list[Tensor] = []

    def touch(self, queue: int, tensors: Iterable[Tensor], writes: bool) -> None:
        tick = [*self.clocks[queue]]
        tick[queue] += 1
        self.clocks[queue] = (tick[0], tick[1])
        for key in {key for tensor in tensors for key in self._keys(tensor)}:
            self.touched.setdefault(key, []).append((queue, self.clocks[queue], writes))

    def _keys(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        for region, region_rows in enumerate(self.regions):
            for part in range(len(region_rows)):
                begin = region_rows[part].data_ptr()
                if begin <= tensor.data_ptr() < begin + region_rows[part].nbytes:
                    yield region, part

    def races(self) -> int:
        """Return the number of races: unordered pairs of accesses to one buffer or layer, with a write."""
        race_count = 0
        for touches in self.touched.values():
            for i, (queue, clock, writes) in enumerate(touches):
                for other_queue, other_clock, also in touches[i + 1 :]:
                    if queue != other_queue and (writes or also):
                        race_count += (
                            other_clock[queue] < clock[queue] and clock[other_queue] < other_clock[other_queue]
                        )
        return race_count

    # operations of a copy stream

    def copy(self, copies: Copies) -> None:
        for to, source in copies:
            self.touch(LANE, [to], writes=True)
            self.touch(LANE, [source], writes=False)
            to.copy_(source)

    def record_copy(self) -> Clock:
        return self.clocks[LANE]

    def record_compute(self) -> Clock:
        return self.clocks[MAIN]

    def copy_after(self, event: Clock | None) -> None:
        self._wait(LANE, event)

    def compute_after(self, event: Clock | None) -> None:
        self._wait(MAIN, event)

    def _wait(self, queue: int, event: Clock | None) -> None:
        if event:
            self.clocks[queue] = tuple(map(max, self.clocks[queue], event))  # type: ignore[assignment]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setitem(shapes.SHAPES, "paired", paired_pools.SHAPE)
    torch_kernels.replace_kernels(monkeypatch)
    watch = Watch()

    def copy_pages(source: Any, from_X: Tensor, target: Any, to_X: Tensor, size: int) -> None:
        watch.touch(MAIN, source, writes=False)
        watch.touch(MAIN, target, writes=True)
        torch_kernels.carried(source, from_X, target, to_X, size)

    def mix(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        watch.touch(MAIN, args[4], writes=True)
        return torch_kernels.mixed(*args)

    monkeypatch.setattr(residency, "CopyStream", lambda device: watch)
    monkeypatch.setattr(frames, "copy_pages", copy_pages)
    for module in (kv, triforce.backends.cuda.offload.kv):
        monkeypatch.setattr(module, "write_and_attend", mix)
    return watch


def races(watch: Watch, seeds: int = 1) -> int:
    decoder = shapes.decoder("paired", paired_pools.CAPACITY)
    for seed in range(seeds):
        pair = paired_pools.PairedPools(paired_pools.room(decoder, resident_layers=0), seed)
        memory = pair.sides[1].pool.kv
        watch.regions = [memory.keys_LGSD, memory.values_LGSD, memory.manager.layout.store]
        pair.run(12)
        race_count, watch.touched = watch.races(), {}
        if race_count:
            return race_count
    return 0


def test_copy_stream_has_no_races(watch: Watch) -> None:
    assert races(watch) == 0
    assert min(watch.clocks[MAIN]) > 100


@pytest.mark.parametrize("mutant", caught_in("test_copy_stream_mutant_races"), ids=str)
def test_copy_stream_mutant_races(mutant: Mutant, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    try:
        race_count = races(watch, seeds=3)
    except (AssertionError, RuntimeError):  # a late copy gives wrong values even where all work is synchronous
        return
    assert race_count
