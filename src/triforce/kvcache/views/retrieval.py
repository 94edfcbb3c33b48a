"""View of a few pages of the target's pool: sinks, pages selected by relevance, and a window of the latest tokens.

It is the paper's retrieval cache (Sun et al. 2024, section 4.1), as an index per layer and KV head instead of a copy.
Shape suffixes: B rows, T tokens fed in one pass, L layers, G KV heads, U units (see `kernel_api.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from math import gcd

import numpy as np

from triforce.arrays import Array, to_host
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, PageTable, Search
from triforce.kvcache.retrieval_config import RetrievalConfig
from triforce.kvcache.selection import PageLists, Policy, RowSelection, select_pages, window_start
from triforce.kvcache.views.full import FullView, by_window, table_by_window
from triforce.ragged import Ints, ints

SEARCH_DIVISOR = 4
"""A search picks 1 / `SEARCH_DIVISOR` of the context, for all tokens of a pass together: these need different keys."""
SKETCH_DIVISOR = 16
"""Number of keys whose search costs about as much as reading one: sketches are small, but all are scored."""
MAX_TRACE_PARTS = 256
"""Parts of a text in a coverage trace, at most."""


class RetrievalView:
    """Lower view of the rows of a `FullView`. It writes only slots at or beyond the committed length.

    Its own length never falls behind the committed length: the verification has written those slots, exactly. All
    tokens are visible while the budget covers the context. Where `observes` is true, its policy scores by the attention
    mass that `full` observes; the code that builds both views calls `full.observe(unit, budget)`.
    """

    def __init__(self, full: FullView, policy: Callable[[], Policy], setting: RetrievalConfig) -> None:
        self.full = full
        self.kv = full.kv
        self.setting = setting
        self.unit = gcd(setting.chunk, PAGE)
        self.selections = [RowSelection(policy()) for _ in full.rows]
        self.observes = self.selections[0].policy.observes
        self._lists = self._new_lists()
        self.full_layers = setting.searched_layers or frozenset()
        """Layers that read all tokens, because the user named them."""
        self.searched_layers: frozenset[int] = frozenset()
        """Layers in which each token searches all tokens. Where the memory has no search, they read all tokens."""
        self.trying = False
        """Whether `searched_layers` includes a layer on trial: passes that search it may not recur."""
        self.budget_factors: dict[int, float] = {}
        """Factor of the budget, by the bits of a context's token count; 1 where none is given.

        A new factor changes the window at once, and the selected pages at their next selection.
        """

    @property
    def lengths_B(self) -> Ints:
        fed_tokens_B = ints([row.fed_tokens for row in self.selections])
        return np.maximum(fed_tokens_B, self.full.lengths_B)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts = self.lengths_B.tolist()
        counts = counts_B.tolist()
        for b, (committed, count) in enumerate(zip(self.full.lengths_B.tolist(), counts, strict=True)):
            row = self.selections[b]
            budget = self.budget(committed)
            row.committed = committed
            if row.pages and committed < row.pages.end:  # the text was cut: some selected tokens are gone
                row.pages = None
            if count and self._needs_selection(b):
                self._select(b)
            row.window_start = window_start(row.pages, committed, budget, self.unit)
        rows = self.full.rows
        self.full.pool.prepare_pass(rows, (self.lengths_B + counts_B).tolist())
        tables = self.full.pool.tables[rows.start : rows.stop]
        return ForwardBatch(starts, self._views(starts, counts), tables=tables, trial=self.trying)

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        for row, fed_tokens in zip(self.selections, (self.lengths_B + batch.views[0][1].counts).tolist(), strict=True):
            row.fed_tokens = fed_tokens

    def rewind(self, lengths_B: Ints) -> None:
        lengths = self.full.lengths_B.tolist(), lengths_B.tolist()
        for row, verified, length in zip(self.selections, *lengths, strict=True):
            if (
                verified > row.committed and length <= row.fed_tokens
            ):  # the full tier verified; otherwise this tier itself rejected
                row.rejected = True
            row.fed_tokens = min(row.fed_tokens, length)

    def budget(self, context: int) -> int:
        """Return the tokens that a row reads of `context` tokens at most."""
        return self.setting.budget.of(context, self.budget_factors.get(context.bit_length(), 1.0))

    def keys_read(self, context: int, searched: int | None = None, budget: int | None = None) -> int:
        """Return the keys that one token reads of `context` keys: the mean of the layers without a window.

        searched: count of searched layers; None: that of `searched_layers`. budget: tokens; None: `budget(context)`.
        Layers with a window are left out: they read what the full tier's layers read.
        """
        pool = self.full.pool
        budget_keys = min(budget or self.budget(context), context)
        windows = pool.config.windows
        searched = len(self.searched_layers) if searched is None else searched
        full_layers = sum(not windows[layer] for layer in self.full_layers)
        layers = windows.count(0)
        if not pool.kv.searches:
            full_layers = full_layers + searched
            searched = 0
        search_keys = max(budget_keys, context // SEARCH_DIVISOR) + context // SKETCH_DIVISOR
        return (
            (full_layers * context + searched * search_keys + (layers - full_layers - searched) * budget_keys) // layers
            if layers
            else budget_keys
        )

    def resume(self, length: int) -> tuple[int, int]:
        """Return an empty range: the full view feeds the prompt."""
        return length, length

    def row(self, b: int) -> RetrievalView:
        """Return this view: no prompt is fed through it."""
        return self

    def fork(self, source: int, row: int) -> None:
        """Copy nothing: pages of the row are selected anew, by the observation of the full view."""

    def select(self, rows: Sequence[int]) -> None:
        self.selections = [self.selections[b] for b in rows]
        self._lists = self._new_lists()

    def join(self, other: RetrievalView) -> None:
        self.selections += other.selections
        self._lists = self._new_lists()

    def swap_out(self, b: int) -> RowSelection:
        """Return a copy of a row's selection, for `swap_in`. It names units by their index in the row: pages change."""
        row = self.selections[b]
        pages = row.pages and replace(row.pages, units=self._places(b, row.pages.units))
        return replace(row, pages=pages)

    def swap_in(self, b: int, swapped: RowSelection) -> None:
        """Restore the selection of a swapped row into empty row b."""
        pages = swapped.pages and replace(swapped.pages, units=self.row_units(b)[swapped.pages.units])
        self.selections[b] = replace(swapped, pages=pages)

    def missed(self, b: int) -> list[float] | None:
        """Return, by layer, the share of the latest verification's attention mass that row b does not read.

        It is the mean of the KV heads. None where the row reads all tokens, or no attention mass was observed.
        """
        row = self.selections[b]
        mass_LGU = self.full.observations[self.full.rows[b]].mass_LGU
        if row.pages is None or mass_LGU is None:
            return None
        xp = self.full.pool.xp
        selected_LG = xp.sum(xp.take_along_axis(mass_LGU, self._places(b, row.pages.units), axis=2), axis=2)
        seen_LG = selected_LG + xp.sum(mass_LGU[..., row.window_start // self.unit :], axis=2)
        missed_L: list[float] = xp.mean(1 - seen_LG / xp.sum(mass_LGU, axis=2), axis=1).tolist()
        return missed_L

    def coverage(self, b: int) -> list[int]:
        """Return, for each of equal parts of row b's text, the percentage of page lists that hold the part's tokens.

        There is a list for each layer and KV head. Layers that read or search all tokens are left out.
        """
        units = -(-int(self.full.lengths_B[b]) // self.unit)
        starts = np.arange(0, units, -(-units // MAX_TRACE_PARTS) or 1)
        row = self.selections[b]
        config = self.full.pool.config
        layers = [layer for layer in range(config.layers) if self._kind(layer) == "selected"]
        if row.pages is None or not layers:
            return [100] * len(starts)
        selected_units = to_host(self._places(b, row.pages.units[layers])).reshape(-1)
        counts_U = np.bincount(selected_units, minlength=units)[:units]
        lists = len(layers) * config.kv_heads
        counts_U[row.window_start // self.unit :] = lists
        sizes = np.diff([*starts, units])
        percents: list[int] = np.rint(np.add.reduceat(counts_U, starts) * 100 / (sizes * lists)).astype(int).tolist()
        return percents

    def _places(self, b: int, units: Array) -> Array:
        """Return the index in row b of each of its `units`, int64 of the same shape."""
        xp = self.full.pool.xp
        row_U = xp.astype(self.row_units(b), xp.int64)
        place = xp.zeros(int(row_U.max()) + 1, dtype=xp.int64, device=row_U.device)
        place[row_U] = xp.arange(len(row_U), device=row_U.device)
        return place[xp.astype(units, xp.int64)]

    def _new_lists(self) -> PageLists:
        """Return empty page lists. The next pass writes those of all rows."""
        return PageLists(self.full.pool, len(self.selections))

    def _needs_selection(self, b: int) -> bool:
        """Whether the row's pages are to be selected before the next pass."""
        row = self.selections[b]
        refresh = self.setting.refresh
        observation = self.full.observations[self.full.rows[b]]
        if row.policy.observes and observation.mass_LGU is None:
            return False  # no mass was requested: the row's batch decoded plainly before the row joined this one
        new_passes = observation.passes - (row.pages.passes if row.pages else 0)
        if row.pages is None:
            return new_passes > 0
        if refresh is None:
            return new_passes > 0 and row.rejected
        return 0 < refresh <= new_passes

    def _select(self, b: int) -> None:
        """Select a row's pages anew by its policy."""
        row = self.selections[b]
        full = self.full
        full_row = self.full.rows[b]
        chunk = self.setting.chunk
        budget = self.budget(row.committed)
        passes = full.observations[full_row].passes
        row.pages = select_pages(
            self.row_units(b), row.committed, budget, row.policy.latest_tokens(budget), chunk,
            lambda candidates, picks: row.policy.pick(full, full_row, chunk, candidates, picks), passes,
        )  # fmt: skip
        if row.pages:
            row.rejected = False

    def row_units(self, b: int) -> Array:
        """Return all pages of row b as units (U)."""
        row = self.full.rows[b]
        pool = self.full.pool
        return pool.units(range(row, row + 1), self.unit)[0, : len(pool.tables[row]) * (PAGE // self.unit)]

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, PageTable]]:
        """Return page tables of the layers of a pass, each with its count of layers.

        Some layers read all tokens; the others read selected pages and the window.
        """
        layers = self.full.pool.config.layers
        unit = self.unit
        committed = [row.committed for row in self.selections]
        full_table = PageTable(
            self.full.pool.units(self.full.rows, unit), starts, counts, unit, low_precision_ends=committed
        )
        if not any(row.pages for row in self.selections):
            return by_window(self.full.pool, full_table, self.full.rows)
        for b, (row, start, count) in enumerate(zip(self.selections, starts, counts, strict=True)):
            window = range(row.window_start // unit, -(-(start + count) // unit))
            self._lists.show(b, row.pages.units if row.pages else None, self.row_units(b), window)
        hidden_tokens = [row.window_start - row.pages.tokens if row.pages else 0 for row in self.selections]
        list_starts, low_precision_ends = (
            [n - hidden_count for n, hidden_count in zip(lengths, hidden_tokens, strict=True)]
            for lengths in (starts, committed)
        )
        searched_table = replace(full_table, search=self._search())
        views: list[tuple[int, PageTable]] = []
        windows = self.full.pool.config.windows
        table_of_window = table_by_window(self.full.pool, full_table, self.full.rows)
        for (kind, window), group in groupby(range(layers), lambda layer: (self._kind(layer), windows[layer])):
            group_layers = list(group)
            units_LBGU = self._lists.units_LBGU[group_layers[0] : group_layers[-1] + 1]
            selected_table = PageTable(units_LBGU, list_starts, counts, unit, low_precision_ends=low_precision_ends)
            views.append(
                (
                    len(group_layers),
                    {"all": table_of_window(window), "searched": searched_table, "selected": selected_table}[kind],
                )
            )
        return views

    def _kind(self, layer: int) -> str:
        reads_all = layer in self.full_layers or self.full.pool.config.windows[layer]
        return "all" if reads_all else "searched" if layer in self.searched_layers else "selected"

    def _search(self) -> Search:
        """Return the search between sinks and window; empty for rows that read all tokens."""
        unit = self.unit
        sinks = PAGE // self.unit
        rows = [
            (sinks, row.window_start // unit, max(row.pages.tokens, row.window_start // SEARCH_DIVISOR) // unit - sinks)
            if row.pages
            else (0, 0, 0)
            for row in self.selections
        ]
        return Search(*map(list, zip(*rows, strict=True)))
