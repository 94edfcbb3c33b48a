"""A measurement of a figure, a clock that waits for the device, and the device's limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any

import torch

from triforce.bench import shapes
from triforce.engine.tier_builder import ModelSet

Row = dict[str, Any]
Names = tuple[str, str]
"""The target's and the draft's shape."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`run` gives seconds, fraction_of_limit and speedup (None where there is none), and perhaps more."""

    what: str
    shape: str
    context: int
    run: Callable[[], Row]
    acceptance: str = "none"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.what, self.shape, self.context

    @property
    def labels(self) -> Row:
        return {"what": self.what, "shape": self.shape, "context": self.context, "acceptance": self.acceptance}


@dataclass
class Setup:
    """Where to measure, and what instead of the figures' own shapes and contexts. Models are made when first used."""

    device: torch.device
    shape: str | None
    draft: str | None
    contexts: list[int] | None
    tokens: int
    kv_memory: str = "auto"
    """Of figures that keep KV on the host: what stays on the device."""
    _models: dict[tuple[Names, int], ModelSet] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def names(self, own: Names) -> Names:
        """Return the shapes to measure; `own` are the figure's."""
        return self.shape or own[0], self.draft or own[1]

    def models(self, names: Names, context: int) -> ModelSet:
        """Of random weights; the latest ones only, as two would not fit beside their KV."""
        key = names, context
        if key not in self._models:
            self._models.clear()
            made = (shapes.decoder(name, context + 1024, self.dtype, device=self.device) for name in names)
            self._models[key] = ModelSet(*made)
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
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second at which memory is copied, read and written counted."""
        return 2 * self._copied(20, device=self.device)

    @cached_property
    def bus(self) -> float:
        """Bytes a second that come from pinned memory of the host."""
        return self._copied(10, pin_memory=self.on_gpu)

    def _copied(self, repeats: int, **where: Any) -> float:
        source = torch.ones(1 << (30 if self.on_gpu else 22), dtype=torch.int8, **where)
        to = torch.empty_like(source, device=self.device)
        return source.numel() / self.seconds(lambda: to.copy_(source, non_blocking=True), repeats)

    @cached_property
    def matrix_rate(self) -> float:
        """Operations a second of a large product, in bfloat16 on a GPU."""
        size = 8192 if self.on_gpu else 256
        a = torch.randn(size, size, device=self.device).to(self.dtype)
        return 2.0 * size**3 / self.seconds(lambda: a @ a, 20)


def speeds(plain: Sequence[float], fast: Sequence[float]) -> Row:
    """Return medians of seconds a token, and of the speedup over plain decoding, which is taken turn by turn."""
    speedups = [a / b for a, b in zip(plain, fast, strict=True)]
    return {
        "seconds": median(fast), "plain_seconds": median(plain), "speedup": median(speedups),
        "spread": max(speedups) - min(speedups),
    }  # fmt: skip
