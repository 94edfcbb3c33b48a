"""Worlds: costs of passes, measured (tests/data/pass_seconds.json) or computed on paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from tests.helpers.planning.traces import Trace

FILE = Path(__file__).parents[2] / "data" / "pass_seconds.json"
NGRAM_SECONDS = 25e-6
OUTLIER = 8.0  # factor of the seconds of an interrupted pass

Seconds = Callable[[str, int, int, float], float]
"""Seconds of a pass by tier, width (of a fused draft: tokens), rows, and keys of all rows."""


@dataclass(frozen=True)
class PaperMachine:
    """A machine and a target on paper: bytes and operations of a pass and of each key."""

    bandwidth: float
    operations: float  # per second
    constant: float  # seconds of a pass
    weights: float  # bytes; each is multiplied once per token: as bfloat16
    key: float  # bytes of keys and values of a token
    group: int  # query heads of a KV head
    draft: tuple[float, float]  # seconds of a fused draft, and of each of its tokens

    def seconds(self, tier: str, width: int, rows: int, keys: float) -> float:
        """The seconds of a pass."""
        if tier == "ngram":
            return NGRAM_SECONDS * rows
        if tier == "draft":
            return self.draft[0] + self.draft[1] * width
        weights = max(self.weights / self.bandwidth, width * rows * self.weights / self.operations)
        kv = keys * max(self.key / self.bandwidth, width * 2 * self.group * self.key / self.operations)
        return self.constant + weights + kv


@dataclass(frozen=True)
class Measured:
    """Passes of a model on one level of kernels, at some lengths and widths."""

    model: str
    level: str

    @cached_property
    def tables(self) -> dict[str, tuple[list[int], list[np.ndarray]]]:
        """Return by tier lengths, and for each length seconds by width, from 0 to 33."""
        tables_by_tier: dict[str, tuple[list[int], list[np.ndarray]]] = {}
        for row_of_file in json.loads(FILE.read_text(encoding="utf-8")):
            if (row_of_file["model"], row_of_file["level"]) == (self.model, self.level):
                for tier, row in row_of_file["ms"].items():
                    widths, ms = zip(*sorted((int(width), ms) for width, ms in row.items()), strict=True)
                    lengths, seconds = tables_by_tier.setdefault(tier, ([], []))
                    slope = (ms[-1] - ms[-3]) / (widths[-1] - widths[-3])
                    at = np.arange(34)
                    beyond = np.maximum(0, at - widths[-1]) * slope
                    lengths.append(row_of_file["length"])
                    seconds.append((np.interp(at, widths, ms) + beyond) / 1000)
        return tables_by_tier

    def seconds(self, tier: str, width: int, rows: int, keys: float) -> float:
        """Return the seconds of a pass. Further rows cost as much as further tokens."""
        if tier == "ngram":
            return NGRAM_SECONDS
        lengths, tables = self.tables["full" if tier == "retrieval" else tier]
        at = [float(row[min(width * rows, 33)]) for row in tables]
        if tier == "draft":
            return sum(at) / len(at)
        extrapolated = at[-1] + (at[-1] - at[-2]) / (lengths[-1] - lengths[-2]) * max(0.0, keys - lengths[-1])
        seconds = extrapolated if keys > lengths[-1] else float(np.interp(keys, lengths, at))
        if tier == "retrieval":  # its pages are scattered
            _, retrieval_tables = self.tables["retrieval"]
            at_2048 = float(np.interp(2048, lengths, [row[1] for row in tables]))
            seconds *= float(retrieval_tables[-1][1]) / at_2048 if keys >= 2048 else 1.04
        return seconds


@dataclass(frozen=True)
class World:
    """Costs of passes for a trace, and the planner's knowledge before.

    busy: factors of all seconds, from these positions of the text on.
    known_seconds: seconds of passes that the profile was made of; None: the profile is empty. widths: of these passes.
    keys: multiplies the tokens of contexts.
    """

    name: str
    seconds: Seconds
    models: tuple[str, ...] = ("pair",)
    draft: bool = True
    rows: int = 1
    busy: Mapping[int, float] = field(default_factory=dict)
    outliers: float = 0.0
    known_seconds: Seconds | None = None
    widths: tuple[int, ...] = (1, 1, 1, 3, 7)
    keys: int = 1
    thought: float = 60e-6  # seconds between two looks at the clock while the planner thinks
    weighing: float = 8e-4  # seconds to weigh plans, with what that empties of the caches
    long: bool = False  # contexts of 16K and more
    level: str = ""  # of the kernels

    def suits(self, trace: Trace) -> bool:
        """Whether a trace is of a model of this world, and long enough."""
        return trace.model in self.models and (trace.prompt >= 16_000 or not self.long)

    @property
    def outlier_factor(self) -> float:
        """The mean factor of all seconds by interruptions."""
        return 1 + self.outliers * (OUTLIER - 1)

    def speed(self, position: int) -> float:
        """Return the factor of all seconds at a position."""
        return next((factor for start, factor in reversed(list(self.busy.items())) if position >= start), 1.0)


def worlds() -> list[World]:
    """Return all worlds."""
    avx2 = Measured("pair", "avx2").seconds
    avx512 = Measured("pair", "avx512bf16").seconds
    small2 = Measured("smollm2", "avx2").seconds
    small512 = Measured("smollm2", "avx512bf16").seconds
    card = PaperMachine(2.5e12, 3e14, 4e-4, 16e9, 131_072, 4, (3e-4, 1.5e-4))
    desktop = PaperMachine(40e9, 1.2e12, 2e-4, 1.2e9, 65_536, 1, (5e-4, 1.2e-3))
    level = "avx512bf16"
    base = World("AVX-512", avx512, known_seconds=avx512, level=level)
    return [
        base,
        World("AVX2", avx2, known_seconds=avx2),
        World("AVX2, cold", avx2),
        World("AVX-512, cold", avx512, thought=40e-6, level=level),
        replace(base, name="busy", busy={0: 1.0, 40: 2.2, 160: 1.0, 400: 1.7, 700: 1.0}, outliers=0.02),
        replace(base, name="another machine's profile", known_seconds=card.seconds),
        replace(base, name="profile of a busy hour", known_seconds=lambda *work: 3 * avx512(*work)),
        World("GPU", card.seconds, known_seconds=card.seconds, keys=4, long=True),
        World("GPU, 4 rows, cold", card.seconds, rows=4, keys=4, long=True),
        World("groups of 1", desktop.seconds, known_seconds=desktop.seconds),
        World("groups of 8", replace(desktop, key=8192, group=8).seconds, known_seconds=None),
        World("SmolLM2, AVX-512", small512, ("smollm2",), draft=False, known_seconds=small512, level=level),
        World("SmolLM2, AVX2, cold", small2, ("smollm2",), draft=False),
        replace(
            base,
            name="SmolLM2, plain texts before",
            seconds=small512,
            models=("smollm2",),
            draft=False,
            known_seconds=small512,
            widths=(1,),
        ),
    ]
