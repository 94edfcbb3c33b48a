"""The least time that work can take here: the roofline (Williams et al. 2009) over what was measured just now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from triforce.backends import dispatch
from triforce.model.config import ModelConfig
from triforce.model.weights import Matrix, Weights, nbytes

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
    many = torch.ones(words, dtype=torch.int64)
    native = dispatch.native
    if not native:
        return [many.sum], lambda seconds: Roofline(many.nbytes / seconds[0], {})
    counts = {name: native.compute(name, ROUNDS) for name in NUMBERS}
    calls: list[Call] = [partial(native.read, many), *(partial(native.compute, name, ROUNDS) for name in NUMBERS)]

    def roofline(seconds: Sequence[float]) -> Roofline:
        peaks = {name: count / took for (name, count), took in zip(counts.items(), seconds[1:], strict=True)}
        return Roofline(many.nbytes / seconds[0], peaks)

    return calls, roofline


class ModelWork:
    """Numbers that the products of a model read, and their bytes; KV is as its config has it."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        experts = {id(part) for layer in weights.layers for expert in layer.experts for part in expert.weights()}
        self._read = {kind: Size() for kind in ("dense", "experts")}
        for weight in weights.multiplied():
            self._read["experts" if id(weight) in experts else "dense"].add(weight)
        self._coded = not weights.has_numbers

    def of(self, width: float, keys: int, config: ModelConfig | None = None, union: float = 1.0) -> Work:
        """Work of a pass of so many tokens, each over so many keys, as this config or the model's own has them.

        union: experts that the pass reads, in so many times those of one token.
        """
        products, attention = self._operations(width, keys)
        config = config or self.config
        operations = Counter({type_of_products(self._coded, "bfloat16"): products})
        operations += Counter(coded_attention(attention) if config.kv_int8 else {"bfloat16": attention})
        return Work(round(self._bytes(union) + config.kv_bytes(2) * self._seen(keys)), operations)

    def of_lower(self, width: float, keys: int, bits: int) -> Work:
        """Work of a pass of a lower tier that reads numbers of so many bits, and codes as they are."""
        weights = self._bytes() if self._coded else self._numbers * bits / 8
        read = round(weights + self.config.lower_bytes * self.config.kv_size * self._seen(keys))
        return Work(read, {type_of_products(self._coded, "int8"): sum(self._operations(width, keys))})

    @property
    def _numbers(self) -> float:
        """Numbers that the products of one token read."""
        return self._read["dense"].numbers + self._chosen * self._read["experts"].numbers

    def _bytes(self, union: float = 1.0) -> float:
        """Bytes that the products of so many times the experts of one token read."""
        return self._read["dense"].bytes + union * self._chosen * self._read["experts"].bytes

    @property
    def _chosen(self) -> float:
        """The part of all experts that one token reads."""
        experts = self.config.architecture.experts
        return experts.active / experts.total if experts else 0.0

    def _seen(self, keys: int) -> float:
        """Return how many of so many keys a token sees, in the mean of the layers."""
        return sum(min(window or keys, keys) for window in self.config.windows) / self.config.layers

    def _operations(self, width: float, keys: int) -> tuple[int, int]:
        """Operations of products with weights, and of attention."""
        queries = self.config.layers * self.config.heads * self.config.head_dim
        return round(2 * width * self._numbers), round(4 * width * self._seen(keys) * queries)


def type_of_products(coded: bool, dtype: str) -> str:
    """Return the type of numbers that are multiplied with weights: with those of few bits, as they are, int16."""
    return "int16" if coded else dtype


def coded_attention(operations: int) -> dict[str, int]:
    """Return so many operations of attention over int8 KV by type: scores are of bytes, weights have 16 bits."""
    return {"int8": operations // 2, "int16": operations // 2}


@dataclass
class Size:
    """Numbers of matrices, and their bytes."""

    numbers: int = 0
    bytes: int = 0

    def add(self, weight: Matrix) -> None:
        """Count one more."""
        self.numbers += math.prod(weight.shape)
        self.bytes += nbytes(weight)


AHEAD = 10_000_000
"""Cycles that a GPU is kept busy, five milliseconds, while the host asks for what is to be timed."""
COPIED = 1 << 30, 1 << 22
"""Bytes that are copied at a time on a GPU, and on a CPU."""
SIZE = 8192, 256
"""Rows and columns of the matrices that are multiplied."""


class DeviceClock:
    """Times calls on one device. On a CPU its own clock is the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers that are measured."""
        return torch.bfloat16 if self._on_gpu else torch.float32

    def seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Median of what the host waits for a call, after one that is not counted."""
        return self._median(self._waited, call, repeats)

    def device_seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Median of what the device is busy with a call that never waits for it; on a CPU, of what the host is.

        The device is kept busy until the host has asked for all of it, so the gaps of a slow host are no part of it.
        """
        return self._median(self._busy if self._on_gpu else self._waited, call, repeats)

    def _median(
        self, timed: Callable[[Callable[[], object]], float], call: Callable[[], object], repeats: int
    ) -> float:
        return median([timed(call) for _ in range(repeats + 1)][1:])

    def _waited(self, call: Callable[[], object]) -> float:
        self.wait()
        began = perf_counter()
        call()
        self.wait()
        return perf_counter() - began

    def _busy(self, call: Callable[[], object]) -> float:
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.wait()
            torch.cuda._sleep(AHEAD)
            begin.record()
            call()
            end.record()
            self.wait()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait until the device is done with everything."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second at which memory is copied, read and written counted."""
        return 2 * self._copied(20, device=self.device)

    @cached_property
    def bus(self) -> float:
        """Bytes a second that come from pinned memory of the host."""
        return self._copied(10, pin_memory=self._on_gpu)

    def _copied(self, repeats: int, **where: Any) -> float:
        source = torch.ones(COPIED[not self._on_gpu], dtype=torch.int8, **where)
        to = torch.empty_like(source, device=self.device)
        return source.numel() / self.seconds(lambda: to.copy_(source, non_blocking=True), repeats)

    @cached_property
    def matrix_rate(self) -> float:
        """Operations a second of a large product, in bfloat16 on a GPU."""
        size = SIZE[not self._on_gpu]
        a = torch.randn(size, size, device=self.device).to(self.dtype)
        return 2.0 * size**3 / self.seconds(lambda: a @ a, 20)
