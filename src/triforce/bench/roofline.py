"""The least time of work on this machine: the roofline (Williams et al. 2009) of rates measured in this process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from triforce.arrays import DType, is_gpu
from triforce.backends import dispatch
from triforce.model.config import ModelConfig
from triforce.model.weights import Matrix, Weights, nbytes

NUMBERS = ("float32", "bfloat16", "int16", "int8")
ROUNDS = 200_000
"""Rounds of a measurement of arithmetic, about a millisecond."""

WORDS = 1 << 27
"""Words of 8 bytes that a measurement of bandwidth reads: a gigabyte, more than caches hold."""
TURNS = 3
"""Turns of each measurement when a machine is only described."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """Bytes that a kernel must read, and its operations by type of numbers; a multiply-add counts as two."""

    bytes: int
    operations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Roofline:
    """Bytes per second, and operations per second by type of numbers."""

    bandwidth: float
    peaks: Mapping[str, float]

    def __str__(self) -> str:
        peaks = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in self.peaks.items())
        return f"reads {self.bandwidth / 1e9:.0f} GB/s" + (f", computes {peaks} GFLOP/s" if peaks else "")

    def balance(self, operations: Mapping[str, int]) -> float | None:
        """Return the operations of this mix that take the time of one byte read; None if a type was not measured."""
        if not operations.keys() <= self.peaks.keys():
            return None
        return sum(operations.values()) / self.least_seconds(Work(0, operations)) / self.bandwidth

    def least_seconds(self, work: Work) -> float:
        """Return the greater of the seconds of the bytes and of the operations.

        Operations of a type that was not measured are not counted.
        """
        compute_seconds = sum(count / self.peaks[name] for name, count in work.operations.items() if name in self.peaks)
        return max(work.bytes / self.bandwidth, compute_seconds)


def measure() -> Roofline:
    """Return the roofline of this machine now, the best of a few turns. It takes under a second and a gigabyte."""
    calls, roofline = probes(WORDS // 4)
    return roofline([min(_seconds(call) for _ in range(TURNS)) for call in calls])


def _seconds(call: Call) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def probes(words: int = WORDS) -> tuple[list[Call], Callable[[Sequence[float]], Roofline]]:
    """Return calls to time, and a function from their seconds to a roofline.

    The first call reads `words`, the others do arithmetic, all with the threads of the kernels. Without native kernels
    torch reads, and no arithmetic is measured. Raises TriforceError where torch is not installed either.
    """
    read_buffer = np.ones(words, np.int64)
    native = dispatch.native
    if not native:
        dispatch.require_torch("measurements of bandwidth without native kernels")
        from triforce.backends.torch.tensors import tensor_of

        return [tensor_of(read_buffer).sum], lambda seconds: Roofline(read_buffer.nbytes / seconds[0], {})
    counts = {name: native.compute(name, ROUNDS) for name in NUMBERS}
    calls: list[Call] = [
        partial(native.read, read_buffer),
        *(partial(native.compute, name, ROUNDS) for name in NUMBERS),
    ]

    def roofline(seconds: Sequence[float]) -> Roofline:
        peaks = {
            name: count / call_seconds for (name, count), call_seconds in zip(counts.items(), seconds[1:], strict=True)
        }
        return Roofline(read_buffer.nbytes / seconds[0], peaks)

    return calls, roofline


class ModelWork:
    """Work of a model's passes: bytes read and operations, of its products with weights and of attention over KV."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        experts = {id(part) for layer in weights.layers for expert in layer.experts for part in expert.weights()}
        self._read = {kind: Size() for kind in ("dense", "experts")}
        for weight in weights.product_matrices():
            self._read["experts" if id(weight) in experts else "dense"].add(weight)
        self._coded = not weights.has_numbers
        int8_matrices = list(weights.int8_input_matrices()) if config.int8_inputs else []
        self._int8_share = sum(math.prod(matrix.shape) for matrix in int8_matrices) / max(
            1, sum(math.prod(matrix.shape) for matrix in weights.product_matrices())
        )
        """Share of the weights whose products take int8 inputs."""

    def pass_work(self, width: float, keys: int, config: ModelConfig | None = None, union: float = 1.0) -> Work:
        """Return the work of a pass of `width` tokens, each over `keys` tokens of KV.

        config: gives the KV's dtype; None: the model's own. union: experts that the pass reads, as a multiple of those
        of one token.
        """
        products, attention = self._operations(width, keys)
        config = config or self.config
        int8_products = round(self._int8_share * products)
        operations = Counter({type_of_products(self._coded, "bfloat16"): products - int8_products})
        operations += Counter({"int8": int8_products})
        operations += Counter(coded_attention(attention) if config.kv_int8 else {"bfloat16": attention})
        return Work(round(self._bytes(union) + config.kv_bytes(2) * self._visible_keys(keys)), operations)

    def lower_pass_work(self, width: float, keys: int, bits: int) -> Work:
        """Return the work of a lower tier's pass that reads weights of `bits` bits, or quantized weights unchanged."""
        weight_bytes = self._bytes() if self._coded else self._numbers * bits / 8
        read_bytes = round(
            weight_bytes + self.config.lower_number_bytes * self.config.kv_size * self._visible_keys(keys)
        )
        return Work(read_bytes, {type_of_products(self._coded, "int8"): sum(self._operations(width, keys))})

    @property
    def _numbers(self) -> float:
        """Return the count of weights that the products of one token read."""
        return self._read["dense"].numbers + self._expert_share * self._read["experts"].numbers

    def _bytes(self, union: float = 1.0) -> float:
        """Return the bytes of weights that products read. union: experts as a multiple of those of one token."""
        return self._read["dense"].bytes + union * self._expert_share * self._read["experts"].bytes

    @property
    def _expert_share(self) -> float:
        """Return the share of all experts that one token reads."""
        experts = self.config.architecture.experts
        return experts.active / experts.total if experts else 0.0

    def _visible_keys(self, keys: int) -> float:
        """Return the number of `keys` that a token attends to, averaged over the layers and their windows."""
        return sum(min(window or keys, keys) for window in self.config.windows) / self.config.layers

    def _operations(self, width: float, keys: int) -> tuple[int, int]:
        """Return the operations of products with weights, and of attention."""
        queries = self.config.layers * self.config.heads * self.config.head_dim
        return round(2 * width * self._numbers), round(4 * width * self._visible_keys(keys) * queries)


def type_of_products(coded: bool, dtype: str) -> str:
    """Return the type of numbers that are multiplied with weights: int16 with quantized weights, else `dtype`."""
    return "int16" if coded else dtype


def coded_attention(operations: int) -> dict[str, int]:
    """Return operations of attention over int8 KV by type: scores multiply int8, weighted sums int16."""
    return {"int8": operations // 2, "int16": operations // 2}


@dataclass
class Size:
    """Count of the numbers in matrices, and their bytes."""

    numbers: int = 0
    bytes: int = 0

    def add(self, weight: Matrix) -> None:
        """Add one matrix."""
        self.numbers += math.prod(weight.shape)
        self.bytes += nbytes(weight)


SPIN_CYCLES = 10_000_000
"""Cycles of a busy loop on a GPU, five milliseconds, during which the host enqueues the timed call."""
COPY_BYTES = 1 << 30, 1 << 22
"""Bytes of one copy on a GPU, and on a CPU."""
MATRIX_SIZE = 8192, 256
"""Rows and columns of the multiplied matrices on a GPU, and on a CPU."""


class DeviceClock:
    """Clock of calls on one device. On a CPU the device's clock is the host's. Rates are measured with torch."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._on_gpu = is_gpu(device)

    @property
    def dtype(self) -> DType:
        """Return the dtype of the measured matrix products."""
        return "bfloat16" if self._on_gpu else "float32"

    def seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Return the median seconds that the host waits for a call, after an untimed one."""
        return self._median(self._host_seconds, call, repeats)

    def device_seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Return the median seconds that the device takes for a call that never waits for it; on a CPU, `seconds`.

        The device spins until the host has enqueued the whole call, so the gaps of a slow host are not counted.
        """
        return self._median(self._busy_seconds if self._on_gpu else self._host_seconds, call, repeats)

    def _median(
        self, timed: Callable[[Callable[[], object]], float], call: Callable[[], object], repeats: int
    ) -> float:
        return median([timed(call) for _ in range(repeats + 1)][1:])

    def _host_seconds(self, call: Callable[[], object]) -> float:
        self.wait()
        start = perf_counter()
        call()
        self.wait()
        return perf_counter() - start

    def _busy_seconds(self, call: Callable[[], object]) -> float:
        import torch

        with torch.cuda.device(self.device):
            begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.wait()
            torch.cuda._sleep(SPIN_CYCLES)
            begin_event.record()
            call()
            end_event.record()
            self.wait()
        return float(begin_event.elapsed_time(end_event)) / 1e3

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize(self.device)

    @cached_property
    def bandwidth(self) -> float:
        """Return the bytes per second of a copy on the device; reads and writes both count."""
        return 2 * self._copy_rate(20, device=self.device)

    @cached_property
    def bus(self) -> float:
        """Return the bytes per second of a copy from pinned host memory."""
        return self._copy_rate(10, pin_memory=self._on_gpu)

    def _copy_rate(self, repeats: int, **source_options: Any) -> float:
        import torch

        source = torch.ones(COPY_BYTES[not self._on_gpu], dtype=torch.int8, **source_options)
        target = torch.empty_like(source, device=self.device)
        return source.numel() / self.seconds(lambda: target.copy_(source, non_blocking=True), repeats)

    @cached_property
    def matrix_rate(self) -> float:
        """Return the operations per second of a large matrix product, in bfloat16 on a GPU."""
        import torch

        from triforce.backends.torch.tensors import torch_dtype

        size = MATRIX_SIZE[not self._on_gpu]
        a = torch.randn(size, size, device=self.device).to(torch_dtype(self.dtype))
        return 2.0 * size**3 / self.seconds(lambda: a @ a, 20)
