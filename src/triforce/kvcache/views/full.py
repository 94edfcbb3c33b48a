"""The full view: every committed page. It owns the committed length and observes attention mass.

Shape suffixes: B rows, T tokens fed in one pass, J scored columns, V vocabulary, L layers, H query heads, G KV heads,
U units, N tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from triforce.arrays import Array, is_gpu, to_host
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, KVBackend, PageTable
from triforce.errors import CacheError
from triforce.kvcache.eagle_memory import EagleHeadSlots
from triforce.kvcache.pool import PagePool
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import Ints


def by_window(pool: PagePool, page_table: PageTable, rows: range) -> list[tuple[int, PageTable]]:
    """Return page tables of all layers in order, each with the count of layers that it is for.

    page_table: the one of layers without a window, which lists whole rows.
    """
    table_of_window = table_by_window(pool, page_table, rows)
    return [(len([*group]), table_of_window(window)) for window, group in groupby(pool.config.windows)]


def table_by_window(pool: PagePool, page_table: PageTable, rows: range) -> Callable[[int], PageTable]:
    """Return a function that maps the window of a layer to its page table; for window 0 that is `page_table`."""
    units_BU = pool.units(rows, page_table.unit, windows=True)
    return lambda window: (
        replace(page_table, units=units_BU, window=window, low_precision_ends=[]) if window else page_table
    )


MAX_OBSERVED_TOKENS = 80
"""Most tokens of a row in a pass that is observed. Verifications are not wider; wider passes are prefill."""

PREFILL_CHUNK = 8192
"""Tokens of a prefill pass on a GPU."""

PREFILL_CHUNK_ON_CPU = 512
"""Tokens of a prefill pass on a CPU: few, so that activations stay in the processor's cache."""

TAIL = 16
"""Last tokens of a prompt, which a pass of their own feeds: it is observed, so that the first selection has queries."""


def prefill_chunk(device: str) -> int:
    """Return the tokens of a prefill pass. Passes end at multiples of it, wherever the first one begins."""
    return PREFILL_CHUNK if is_gpu(device) else PREFILL_CHUNK_ON_CPU


LayerKV = tuple[Array, Array]
"""K and V of a layer, each (G, N, D)."""


@dataclass(frozen=True, slots=True)
class AttentionObservation:
    """Observation of a row's last pass: rotated queries of its tokens, and the attention mass of units.

    start: position of the first query. passes: observed passes of the row so far. grain: tokens of a unit. mass_LGU is
    None where no mass was requested.
    """

    start: int = 0
    passes: int = 0
    grain: int = 0
    queries_LTHD: Array = field(default_factory=lambda: np.empty(0))
    mass_LGU: Array | None = None

    def query(self, position: int) -> Array:
        """Return the query of the token at `position`, (L, H, D), or the nearest query of the pass."""
        return self.queries_LTHD[:, min(max(position - self.start, 0), self.queries_LTHD.shape[1] - 1)]


@dataclass(frozen=True, slots=True)
class SwappedKV:
    """A row's contents: K and V of its committed tokens for each layer, and its last observation.

    K and V are host arrays once the row is swapped out. eagle_slots: contents of an EAGLE head's memory for these
    tokens. window_start: first token that layers with pages of their own hold.
    """

    length: int
    layers: Iterable[LayerKV]
    observation: AttentionObservation
    eagle_slots: EagleHeadSlots | None
    window_start: int = 0


class FullView:
    """View of all tokens of rows `rows` of a pool. It owns the committed length of the pool.

    grain: tokens of a unit, a page or a part of one. Verifications return the attention mass of each unit, at a small
    cost. 0: they return none. None: the pool's unit.
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
        """Observe from now on the attention mass of units of `grain` tokens; 0: no mass.

        budget: tokens that a lower view selects by this mass. Where KV is offloaded, they are to stay in memory.
        """
        self.grain = grain
        self.budget = budget

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        pool = self.pool
        rows = slice(self.rows.start, self.rows.stop)
        observe = width <= MAX_OBSERVED_TOKENS
        starts = pool.lengths_B[rows].tolist()
        unit = self.grain or PAGE
        if pool.windows:
            pool.prepare_pass(self.rows, (pool.lengths_B[rows] + counts_B).tolist())
        units_BU = pool.pages_BP[rows] if unit == PAGE else pool.units(self.rows, unit)
        page_table = PageTable(units_BU, starts, counts_B.tolist(), unit)
        return_mass = observe and self.grain > 0
        budget = self.budget
        retained_pages = max(map(budget.of, starts)) // PAGE if budget and pool.offloaded and observe else 0
        views = by_window(pool, page_table, self.rows) if pool.has_window_layers else [(pool.config.layers, page_table)]
        tables = pool.tables[rows]
        return ForwardBatch(
            starts,
            views,
            observe,
            return_mass,
            pool.min_pass_shape,
            past_committed=True,
            retained_pages=retained_pages,
            tables=tables,
        )

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        self.pool.lengths_B[self.rows.start : self.rows.stop] += batch.views[0][1].counts
        if output is None or output.queries_LBTHD is None:
            return
        queries_LBTHD = output.queries_LBTHD
        mass_LBGU = output.mass_LBGU
        page_table = batch.views[0][1]
        for i, (b, start, count) in enumerate(zip(self.rows, page_table.starts, page_table.counts, strict=True)):
            if count:
                mass_LGU = mass_LBGU[:, i] if mass_LBGU is not None else None
                passes = self.observations[b].passes + 1
                queries_LTHD = queries_LBTHD[:, i, :count]
                self.observations[b] = AttentionObservation(start, passes, page_table.unit, queries_LTHD, mass_LGU)

    def rewind_length(self, b: int, length: int) -> int:
        """Return the length to which row b can be rewound: `length`, or 0 where the windows before it are freed."""
        windows = self.pool.windows
        return length if windows is None or windows.holds(self.rows[b], length) else 0

    def rewind(self, lengths_B: Ints) -> None:
        """Rewind each row to at most its length in `lengths_B`. Raises CacheError where its windows are freed."""
        view_lengths_B = self.lengths_B
        np.minimum(view_lengths_B, lengths_B, out=view_lengths_B)
        for b in self.rows if (windows := self.pool.windows) else ():
            if windows and not windows.holds(b, length := int(self.pool.lengths_B[b])):
                if length:
                    raise CacheError(f"the windows before token {length} are gone; rewind to 0 and read all again")
                windows.clear(b)

    def resume(self, length: int) -> tuple[int, int]:
        fed_tokens = int(self.lengths_B[0])
        tail = max(fed_tokens, length - TAIL)
        chunk = prefill_chunk(self.pool.device)
        if self.pool.layerwise_prefill:  # all tokens go through one layer before the next
            return fed_tokens, tail if fed_tokens < tail else length
        return fed_tokens, min((fed_tokens // chunk + 1) * chunk, tail) if fed_tokens < tail else length

    def row(self, b: int) -> FullView:
        row_view = copy(self)
        row_view.rows = self.rows[b : b + 1]
        return row_view

    def select(self, rows: Sequence[int]) -> None:
        self.pool.select(rows)
        self.observations[:] = [self.observations[b] for b in rows]
        self.rows = range(len(rows))

    def join(self, other: FullView) -> None:
        self.pool.join(other.pool)
        self.observations += other.observations
        self.rows = range(len(self.observations))

    def swap_out(self, b: int) -> SwappedKV:
        """Return a copy of a row's contents on the host, for `swap_in`."""
        row_kv = self._row_kv(b)
        eagle_slots = row_kv.eagle_slots.to_host() if row_kv.eagle_slots else None
        return replace(row_kv, layers=host_copies(row_kv.layers), eagle_slots=eagle_slots)

    def swap_in(self, b: int, swapped: SwappedKV) -> None:
        """Restore a swapped row's contents into empty row b, whose pages are reserved."""
        row = self.rows[b]
        pool = self.pool
        pool.write(row, swapped.length, swapped.layers, swapped.window_start)
        if pool.eagle_memory and swapped.eagle_slots:
            pool.eagle_memory.write(pool.slots(row, 0, swapped.length), swapped.eagle_slots)
        self.observations[row] = swapped.observation

    def fork(self, source: int, row: int) -> None:
        """Copy the contents of row `source` into empty row `row`, whose pages are reserved."""
        self.swap_in(row, self._row_kv(source))

    def _row_kv(self, b: int) -> SwappedKV:
        """Return the contents of row b. Layers are read lazily, one at a time."""
        row = self.rows[b]
        pool = self.pool
        length = int(pool.lengths_B[row])
        layers = (
            pool.span(layer, row, pool.first_cached_token(layer, row), length) for layer in range(pool.config.layers)
        )
        eagle_slots = pool.eagle_memory.read(pool.slots(row, 0, length)) if pool.eagle_memory else None
        window_start = pool.windows.first_pages[row] * PAGE if pool.windows else 0
        return SwappedKV(length, layers, self.observations[row], eagle_slots, window_start)


def host_copies(layers: Iterable[LayerKV]) -> list[LayerKV]:
    """Return copies of each layer's K and V on the host."""
    return [(np.array(to_host(keys_GND)), np.array(to_host(values_GND))) for keys_GND, values_GND in layers]


def write_layers(
    memory: KVBackend, slots_N: Array, layers: Iterable[tuple[int, LayerKV]], tokens: slice = slice(None)
) -> None:
    """Write K and V of these layers into slots of a memory, bit for bit. tokens: the part of them to write."""
    for layer, (keys_GND, values_GND) in layers:
        memory.write(layer, slots_N, keys_GND[:, tokens], values_GND[:, tokens])
