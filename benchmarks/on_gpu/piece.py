"""A measurement of a figure, a clock that waits for the device, and the device's limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any

import torch

from triforce.bench import shapes
from triforce.engine.tier_builder import ModelSet

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """`run` gives seconds, fraction_of_limit and speedup (None where there is none), and perhaps more."""

    what: str
    shape: str
    context: int
    acceptance: str
    run: Callable[[], Row]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.what, self.shape, self.context

    @property
    def labels(self) -> Row:
        return {"what": self.what, "shape": self.shape, "context": self.context, "acceptance": self.acceptance}


@dataclass
class Setup:
    """Where to measure, and what instead of the figures' own shapes and contexts. ModelSet are made when first used."""

    device: torch.device
    shape: str | None
    draft: str | None
    contexts: list[int] | None
    tokens: int
    kv_memory: str = "auto"
    """Of figures that keep KV on the host: what stays on the device."""
    _models: dict[tuple[str, str, int], ModelSet] = field(default_factory=dict)

    def models(self, shape: str, draft: str, context: int) -> ModelSet:
        """Of random weights; the latest ones only, as two would not fit beside their KV."""
        key = shape, draft, context
        if key not in self._models:
            self._models.clear()
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            target, small = (shapes.decoder(name, context, dtype, device=self.device) for name in (shape, draft))
            self._models[key] = ModelSet(target, small)
        return self._models[key]

    def forget(self) -> None:
        """The models: somebody else needs their memory."""
        self._models.clear()
        torch.cuda.empty_cache()

    def seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Median of the times of a call, after one that is not counted."""
        times: list[float] = []
        for _ in range(repeats + 1):
            self.wait()
            began = perf_counter()
            call()
            self.wait()
            times.append(perf_counter() - began)
        return median(times[1:])

    def wait(self) -> None:
        """Until the device is done with everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second at which memory is copied, read and written counted."""
        size = 1 << (30 if self.device.type == "cuda" else 22)
        source = torch.ones(size, dtype=torch.int8, device=self.device)
        to = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: to.copy_(source), 20)

    @cached_property
    def bus(self) -> float:
        """Bytes a second that come from pinned memory of the host."""
        on_gpu = self.device.type == "cuda"
        source = torch.ones(1 << (30 if on_gpu else 22), dtype=torch.int8, pin_memory=on_gpu)
        to = torch.empty_like(source, device=self.device)
        return source.numel() / self.seconds(lambda: to.copy_(source, non_blocking=True), 10)

    @cached_property
    def matrix_rate(self) -> float:
        """Operations a second of a large product, in bfloat16 on a GPU."""
        on_gpu = self.device.type == "cuda"
        size = 8192 if on_gpu else 256
        a = torch.randn(size, size, device=self.device).to(torch.bfloat16 if on_gpu else torch.float32)
        return 2.0 * size**3 / self.seconds(lambda: a @ a, 20)
