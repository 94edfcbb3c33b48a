"""The least time that work can take here: the roofline (Williams et al. 2009) over what was measured just now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from triforce.backends import native_loader

NUMBERS = ("float32", "bfloat16", "int16", "int8")
ROUNDS = 200_000
"""Of a measurement of arithmetic: a millisecond or so."""

WORDS = 1 << 27
"""Of 8 bytes that a measurement of bandwidth reads: a gigabyte, more than caches hold."""
TURNS = 3
"""Of each measurement, for a machine that is only to be described."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """Bytes that a kernel must read, and its operations by type of numbers: two for a product and its sum."""

    bytes: int
    operations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Roofline:
    """Bytes a second, and operations a second of each type of numbers."""

    bandwidth: float
    peaks: Mapping[str, float]

    def __str__(self) -> str:
        peaks = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in self.peaks.items())
        return f"reads {self.bandwidth / 1e9:.0f} GB/s" + (f", computes {peaks} GFLOP/s" if peaks else "")

    def balance(self, operations: Mapping[str, int]) -> float | None:
        """Return how many operations of such a mix are done while a byte is read; None where some were not measured."""
        if not operations.keys() <= self.peaks.keys():
            return None
        return sum(operations.values()) / self.least_seconds(Work(0, operations)) / self.bandwidth

    def least_seconds(self, work: Work) -> float:
        """Return what the bytes take or what the operations take, whichever is more.

        Operations of a type that was not measured count nothing.
        """
        computing = sum(count / self.peaks[name] for name, count in work.operations.items() if name in self.peaks)
        return max(work.bytes / self.bandwidth, computing)


def measure() -> Roofline:
    """Return the roofline of this machine now, in a part of a second and of a gigabyte: the best of a few turns."""
    calls, roofline = probes(WORDS // 4)
    return roofline([min(_seconds(call) for _ in range(TURNS)) for call in calls])


def _seconds(call: Call) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def probes(words: int = WORDS) -> tuple[list[Call], Callable[[Sequence[float]], Roofline]]:
    """Return calls to be timed, and what makes a roofline of their seconds: so many words read, then arithmetic.

    The threads of the kernels do it. Without native kernels torch reads, and no arithmetic is measured.
    """
    many, native = torch.ones(words, dtype=torch.int64), native_loader.native
    if not native:
        return [many.sum], lambda seconds: Roofline(many.nbytes / seconds[0], {})
    counts = {name: native.compute(name, ROUNDS) for name in NUMBERS}
    calls: list[Call] = [partial(native.read, many), *(partial(native.compute, name, ROUNDS) for name in NUMBERS)]

    def roofline(seconds: Sequence[float]) -> Roofline:
        peaks = {name: count / took for (name, count), took in zip(counts.items(), seconds[1:], strict=True)}
        return Roofline(many.nbytes / seconds[0], peaks)

    return calls, roofline
