"""Seconds of a call by the host's clock and by the device's own; how fast the device copies and multiplies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any

import torch

AHEAD = 10_000_000
"""Cycles that a GPU is kept busy, five milliseconds, while the host asks for what is to be timed."""
COPIED = 1 << 30, 1 << 22
"""Bytes that are copied at a time on a GPU, and on a CPU."""
SIZE = 8192, 256
"""Rows and columns of the matrices that are multiplied."""


class DeviceClock:
    """Times calls on one device. On a CPU its own clock is the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_gpu = device, device.type == "cuda"

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
