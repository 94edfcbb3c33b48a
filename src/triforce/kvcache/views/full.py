"""The exact view: every committed page. It owns the committed length and reports where attention went.

Shape suffixes: B rows, T tokens fed in one pass, J scored columns, V vocabulary, L layers, H query heads, G KV heads,
U units, N tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, KVBackend, PageTable
from triforce.errors import CacheError
from triforce.kvcache.feature_memory import FeatureSlots
from triforce.kvcache.pool import PagePool
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import Ints


def by_window(pool: PagePool, lists: PageTable, rows: range) -> list[tuple[int, PageTable]]:
    """Return the page tables of all layers in order, and for how many each counts. `lists`: of whole rows."""
    see = windowed(pool, lists, rows)
    return [(len([*group]), see(window)) for window, group in groupby(pool.config.windows)]


def windowed(pool: PagePool, lists: PageTable, rows: range) -> Callable[[int], PageTable]:
    """Return what gives, for a window, the page table of layers that have it; 0: they see all of whole rows."""
    units_BU = pool.units(rows, lists.unit, windows=True)
    return lambda window: replace(lists, units=units_BU, window=window, coarse=[]) if window else lists


OBSERVED = 80
"""Passes of at most so many tokens a row report what they saw. No verification is wider; the rest is prefill."""

PREFILL, PREFILL_ON_CPU = 8192, 512
"""Tokens of a prompt fed in one pass: on a CPU few, as their activations then stay in cache and memory."""

TAIL = 16
"""A prompt's last tokens are fed apart, so that the first selection has queries to go by."""


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prompt between two places where its passes end, both multiples of this, wherever it begins."""
    return PREFILL_ON_CPU if device.type == "cpu" else PREFILL


LayerKV = tuple[Tensor, Tensor]
"""K and V of a layer, each (G, N, D)."""


@dataclass(frozen=True, slots=True)
class AttentionObservation:
    """Rotated queries of a row's last pass, and the mass of units of `grain` tokens, if anybody asked for it."""

    start: int = 0
    passes: int = 0
    grain: int = 0
    queries_LTHD: Tensor = field(default_factory=lambda: torch.empty(0))
    mass_LGU: Tensor | None = None

    def query(self, position: int) -> Tensor:
        """The query of the token at `position`, (L, H, D); the nearest one of the pass where it was not fed in it."""
        return self.queries_LTHD[:, min(max(position - self.start, 0), self.queries_LTHD.shape[1] - 1)]


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """A row: K and V of its committed tokens for each layer, on the host once swapped out, and what it saw last.

    features: what a feature draft holds of them. window_start: the token from which on layers that have pages of their
    own hold theirs.
    """

    length: int
    layers: Iterable[LayerKV]
    observation: AttentionObservation
    features: FeatureSlots | None
    window_start: int = 0


class FullView:
    """All tokens of rows `rows` of a pool, whose committed length is its own.

    `grain`: tokens of the units whose attention mass verifications report, at a small cost (0: none; None: pool's).
    """

    def __init__(self, pool: PagePool, grain: int | None = None) -> None:
        self.pool = pool
        self.kv = pool.kv
        self.grain = pool.unit if grain is None else grain
        self.rows = range(len(pool.tables))
        self.observations = [AttentionObservation() for _ in pool.tables]
        self.budget: Budget | None = None

    @property
    def lengths_B(self) -> Ints:
        return self.pool.lengths_B[self.rows.start : self.rows.stop]

    def observe(self, grain: int, budget: Budget | None = None) -> None:
        """Report from now on the attention mass of units of `grain` tokens; 0: of none.

        `budget`: a view below selects so much by it, which is to stay in memory where KV is offloaded.
        """
        self.grain = grain
        self.budget = budget

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        pool = self.pool
        rows = slice(self.rows.start, self.rows.stop)
        observe = width <= OBSERVED
        starts = pool.lengths_B[rows].tolist()
        unit = self.grain or PAGE
        if pool.windows:
            pool.cover(self.rows, (pool.lengths_B[rows] + counts_B).tolist())
        units_BU = pool.pages_BP[rows] if unit == PAGE else pool.units(self.rows, unit)
        lists = PageTable(units_BU, starts, counts_B.tolist(), unit)
        return_mass = observe and self.grain > 0
        budget = self.budget
        keep = max(map(budget.of, starts)) // PAGE if budget and pool.offloaded and observe else 0
        views = by_window(pool, lists, self.rows) if pool.windowed else [(pool.config.layers, lists)]
        tables = pool.tables[rows]
        return ForwardBatch(starts, views, observe, return_mass, pool.least, exact=True, keep=keep, tables=tables)

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        self.pool.lengths_B[self.rows.start : self.rows.stop] += batch.views[0][1].counts
        if output is None or output.queries_LBTHD is None:
            return
        queries_LBTHD = output.queries_LBTHD
        mass_LBGU = output.mass_LBGU
        lists = batch.views[0][1]
        for i, (b, start, count) in enumerate(zip(self.rows, lists.starts, lists.counts, strict=True)):
            if count:
                mass_LGU = mass_LBGU[:, i] if mass_LBGU is not None else None
                passes = self.observations[b].passes + 1
                queries_LTHD = queries_LBTHD[:, i, :count]
                self.observations[b] = AttentionObservation(start, passes, lists.unit, queries_LTHD, mass_LGU)

    def rewindable(self, b: int, length: int) -> int:
        """Return the length that row b can be rewound to for `length`: 0 where the windows before that are gone."""
        windows = self.pool.windows
        return length if windows is None or windows.holds(self.rows[b], length) else 0

    def rewind(self, lengths_B: Ints) -> None:
        """Forget what is behind these lengths, each of them `rewindable`. Raises CacheError where one is not."""
        seen_B = self.lengths_B
        np.minimum(seen_B, lengths_B, out=seen_B)
        for b in self.rows if (windows := self.pool.windows) else ():
            if windows and not windows.holds(b, length := int(self.pool.lengths_B[b])):
                if length:
                    raise CacheError(f"the windows before token {length} are gone; rewind to 0 and read all again")
                windows.forget(b)

    def resume(self, length: int) -> tuple[int, int]:
        seen = int(self.lengths_B[0])
        tail = max(seen, length - TAIL)
        chunk = prefill_chunk(self.pool.device)
        if self.pool.by_layer:  # all tokens go through a layer
            return seen, tail if seen < tail else length
        return seen, min((seen // chunk + 1) * chunk, tail) if seen < tail else length

    def row(self, b: int) -> FullView:
        one = copy(self)
        one.rows = self.rows[b : b + 1]
        return one

    def select(self, rows: Sequence[int]) -> None:
        self.pool.select(rows)
        self.observations[:] = [self.observations[b] for b in rows]
        self.rows = range(len(rows))

    def join(self, other: FullView) -> None:
        self.pool.join(other.pool)
        self.observations += other.observations
        self.rows = range(len(self.observations))

    def swap_out(self, b: int) -> SwappedKV:
        """A copy of what a row holds, for `swap_in`."""
        held = self._held(b)
        features = held.features.to_host() if held.features else None
        return replace(held, layers=to_host(held.layers), features=features)

    def swap_in(self, b: int, held: SwappedKV) -> None:
        """Let a fresh row, whose pages are reserved, go on as the one that was swapped out."""
        row = self.rows[b]
        pool = self.pool
        pool.write(row, held.length, held.layers, held.window_start)
        if pool.features and held.features:
            pool.features.write(pool.slots(row, 0, held.length), held.features)
        self.observations[row] = held.observation

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row, whose pages are reserved, see what another row has seen."""
        self.swap_in(row, self._held(source))

    def _held(self, b: int) -> SwappedKV:
        """Return what a row holds; each layer is read when its turn comes."""
        row = self.rows[b]
        pool = self.pool
        length = int(pool.lengths_B[row])
        layers = (pool.span(layer, row, pool.held_from(layer, row), length) for layer in range(pool.config.layers))
        features = pool.features.read(pool.slots(row, 0, length)) if pool.features else None
        window_start = pool.windows.firsts[row] * PAGE if pool.windows else 0
        return SwappedKV(length, layers, self.observations[row], features, window_start)


def to_host(layers: Iterable[LayerKV]) -> list[LayerKV]:
    """Copies on the host of K and V of each layer."""
    return [(keys_GND.to("cpu", copy=True), values_GND.to("cpu", copy=True)) for keys_GND, values_GND in layers]


def write_layers(
    memory: KVBackend, slots_N: Tensor, layers: Iterable[tuple[int, LayerKV]], tokens: slice = slice(None)
) -> None:
    """Write some tokens of K and V of these layers into slots of this memory, bit for bit."""
    for layer, held in layers:
        keys_GND, values_GND = (each[:, tokens] for each in held)
        memory.write(layer, slots_N, keys_GND.to(slots_N.device), values_GND.to(slots_N.device))
