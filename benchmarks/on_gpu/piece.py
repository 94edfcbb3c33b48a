"""A measurement of a figure, and where figures are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch

from triforce.arrays import is_gpu
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.torch.tensors import torch_dtype
from triforce.bench import shapes
from triforce.bench.roofline import DeviceClock
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

    device: str
    shape: str | None
    draft: str | None
    contexts: list[int] | None
    tokens: int
    kv_memory: str = "auto"
    """Of figures that keep KV on the host: what stays on the device."""
    kv_int8: bool = False
    _models: dict[tuple[Names, int, bool, str], ModelSet] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return is_gpu(self.device)

    def names(self, figure_names: Names) -> Names:
        """Return the shapes to measure; `figure_names` are the figure's."""
        return self.shape or figure_names[0], self.draft or figure_names[1]

    def models(self, names: Names, context: int) -> ModelSet:
        """Return models of random weights. Only the latest ones are held, as two would not fit beside their KV."""
        key = names, context, self.kv_int8, dispatch.requested
        if key not in self._models:
            self._models.clear()
            how = context + 1024, self.clock.dtype, self.kv_int8
            target, draft = (Decoder(*shapes.parts(name, *how), self.device) for name in names)
            self._models[key] = ModelSet(target, draft)
        return self._models[key]

    def drop_models(self) -> None:
        """Drop the models, to free their memory."""
        self._models.clear()
        torch.cuda.empty_cache()

    @cached_property
    def clock(self) -> DeviceClock:
        return DeviceClock(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return torch's type of the numbers that are measured."""
        return torch_dtype(self.clock.dtype)


def speeds(plain: Sequence[float], fast: Sequence[float]) -> Row:
    """Return medians of seconds a token, and of the speedup over plain decoding, which is taken turn by turn."""
    speedups = [a / b for a, b in zip(plain, fast, strict=True)]
    return {
        "seconds": median(fast), "plain_seconds": median(plain), "speedup": median(speedups),
        "spread": max(speedups) - min(speedups),
    }  # fmt: skip


def of_limit(setup: Setup, took: float, moved: int) -> Row:
    """Return the row of a pass that reads `moved` bytes. `fraction_of_limit`: of the memory's bandwidth."""
    limit = moved / setup.clock.bandwidth / took
    return {"seconds": took, "bytes": moved, "fraction_of_limit": limit, "speedup": None}


def capped(setup: Setup, cap: int, piece: Piece) -> Row:
    """Measure a piece as on a device of `cap` bytes."""
    if not setup.on_gpu:
        return piece.run()
    torch.cuda.empty_cache()  # what is kept for later counts
    total = torch.cuda.mem_get_info(setup.device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), setup.device)
    try:
        return piece.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setup.device)


def left_out(reason: str) -> Row:
    """Return the row of what is not there to be measured."""
    return {"seconds": None, "fraction_of_limit": None, "speedup": None, "left_out": reason}
