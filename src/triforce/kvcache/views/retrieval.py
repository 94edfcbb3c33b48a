"""The target seen through a few pages of its own pool: sinks, those picked by relevance, and a window of the latest.

The paper's retrieval cache (Sun et al. 2024, section 4.1), as an index per layer and KV head instead of a copy.
Shape suffixes: B rows, T tokens fed in one pass, L layers, G KV heads, U units (see `kernel_api.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from math import gcd

import numpy as np
import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, PageTable, Search
from triforce.kvcache.retrieval_config import RetrievalConfig
from triforce.kvcache.selection import PageLists, Policy, RowSelection, select_pages, window_start
from triforce.kvcache.views.full import FullView, by_window, windowed
from triforce.ragged import Ints, ints

FOUND = 4
"""A search may find this part of the context: new tokens of a pass share it, and each looks for something else."""
GLANCE = 16
"""A search of so many keys costs about what one costs that is read: their sketches are small, but all are looked at."""
PARTS = 256
"""A picture of a text is cut into so many parts at most."""


class RetrievalView:
    """A lower view of the rows of a `FullView` view. It writes only slots at or beyond the committed length.

    Its own length never falls behind the committed one: the verification has written those slots, exactly. Everything
    is visible while the budget covers the context. Where `observes`, its policy goes by the attention mass that `full`
    observes: whoever puts the two together says `full.observe(unit, budget)`.
    """

    def __init__(self, full: FullView, policy: Callable[[], Policy], setting: RetrievalConfig) -> None:
        self.full = full
        self.kv = full.kv
        self.setting = setting
        self.unit = gcd(setting.chunk, PAGE)
        self.selections = [RowSelection(policy()) for _ in full.rows]
        self.observes = self.selections[0].policy.observes
        self._lists = self._no_lists()
        self.full_layers = setting.searched_layers or frozenset()
        self.searched_layers: frozenset[int] = frozenset()
        """Those in which each token looks for what it needs anew; all of it, where the memory does not search."""
        self.trying = False
        """Whether these are only tried: such passes may never come again."""
        self.budget_factors: dict[int, float] = {}
        """How many times its budget it reads of contexts of so many bits, from the next selection on; else once."""

    @property
    def lengths_B(self) -> Ints:
        ahead_B = ints([row.ahead for row in self.selections])
        return np.maximum(ahead_B, self.full.lengths_B)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts = self.lengths_B.tolist()
        counts = counts_B.tolist()
        for b, (committed, count) in enumerate(zip(self.full.lengths_B.tolist(), counts, strict=True)):
            row = self.selections[b]
            budget = self.budget(committed)
            row.committed = committed
            if row.pages and committed < row.pages.end:  # the text was cut: some of what was selected is gone
                row.pages = None
            if count and self._due(b):
                self._select(b)
            row.window_start = window_start(row.pages, committed, budget, self.unit)
        rows = self.full.rows
        self.full.pool.cover(rows, (self.lengths_B + counts_B).tolist())
        tables = self.full.pool.tables[rows.start : rows.stop]
        return ForwardBatch(starts, self._views(starts, counts), tables=tables, trial=self.trying)

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        for row, ahead in zip(self.selections, (self.lengths_B + batch.views[0][1].counts).tolist(), strict=True):
            row.ahead = ahead

    def rewind(self, lengths_B: Ints) -> None:
        ends = self.full.lengths_B.tolist(), lengths_B.tolist()
        for row, verified, length in zip(self.selections, *ends, strict=True):
            if verified > row.committed and length <= row.ahead:  # else the refusal was this tier's own
                row.refused = True
            row.ahead = min(row.ahead, length)

    def budget(self, context: int) -> int:
        """Tokens that it reads of so many."""
        return self.setting.budget.of(context, self.budget_factors.get(context.bit_length(), 1.0))

    def keys(self, context: int, searched: int | None = None, budget: int | None = None) -> int:
        """Return the keys that a token costs to read of so many, if so many layers are searched.

        That is the mean of the layers without a window: the others read what the full tier's read.
        """
        pool = self.full.pool
        some = min(budget or self.budget(context), context)
        windows = pool.config.windows
        searched = len(self.searched_layers) if searched is None else searched
        whole = sum(not windows[layer] for layer in self.full_layers)
        layers = windows.count(0)
        if not pool.kv.searches:
            whole = whole + searched
            searched = 0
        found = max(some, context // FOUND) + context // GLANCE
        return (whole * context + searched * found + (layers - whole - searched) * some) // layers if layers else some

    def resume(self, length: int) -> tuple[int, int]:
        """The exact view has seen to it."""
        return length, length

    def row(self, b: int) -> RetrievalView:
        """Return this view: there is nothing to feed through one row."""
        return self

    def fork(self, source: int, row: int) -> None:
        """Pages of the row are selected afresh, by what the exact view has observed."""

    def select(self, rows: Sequence[int]) -> None:
        self.selections = [self.selections[b] for b in rows]
        self._lists = self._no_lists()

    def join(self, other: RetrievalView) -> None:
        self.selections += other.selections
        self._lists = self._no_lists()

    def swap_out(self, b: int) -> RowSelection:
        """A copy of a row, for `swap_in`. Its pages are kept by places, as it will have others."""
        row = self.selections[b]
        pages = row.pages and replace(row.pages, units=self._places(b, row.pages.units))
        return replace(row, pages=pages)

    def swap_in(self, b: int, held: RowSelection) -> None:
        """Let a fresh row go on as the one that was swapped out."""
        pages = held.pages and replace(held.pages, units=self.row_units(b)[held.pages.units])
        self.selections[b] = replace(held, pages=pages)

    def missed(self, b: int) -> list[float] | None:
        """Return, by layer, the share of the latest verification's attention outside of what row b reads.

        In the mean of the KV heads. None where it reads everything, or no attention mass was observed.
        """
        row = self.selections[b]
        mass_LGU = self.full.observations[self.full.rows[b]].mass_LGU
        if row.pages is None or mass_LGU is None:
            return None
        selected_LG = mass_LGU.gather(2, self._places(b, row.pages.units)).sum(2)
        seen_LG = selected_LG + mass_LGU[..., row.window_start // self.unit :].sum(2)
        missed_L: list[float] = (1 - seen_LG / mass_LGU.sum(2)).mean(1).tolist()
        return missed_L

    def coverage(self, b: int) -> list[int]:
        """Return, for equal parts of row b's text from its start, the percentage of lists that its tokens stand in.

        There is a list for each layer and KV head; layers that see or search everything are left out.
        """
        units = -(-int(self.full.lengths_B[b]) // self.unit)
        starts = np.arange(0, units, -(-units // PARTS) or 1)
        row = self.selections[b]
        config = self.full.pool.config
        layers = [layer for layer in range(config.layers) if self._kind(layer) == "selected"]
        if row.pages is None or not layers:
            return [100] * len(starts)
        seen = self._places(b, row.pages.units[layers]).flatten().cpu().numpy()
        counts_U = np.bincount(seen, minlength=units)[:units]
        lists = len(layers) * config.kv_heads
        counts_U[row.window_start // self.unit :] = lists
        sizes = np.diff([*starts, units])
        percents: list[int] = np.rint(np.add.reduceat(counts_U, starts) * 100 / (sizes * lists)).astype(int).tolist()
        return percents

    def _places(self, b: int, units: Tensor) -> Tensor:
        """Return where units of row b stand in it, counted from its start: their shape, int64."""
        row_U = self.row_units(b)
        place = torch.zeros(int(row_U.max()) + 1, dtype=torch.long, device=row_U.device)
        place[row_U.long()] = torch.arange(len(row_U), device=row_U.device)
        return place[units.long()]

    def _no_lists(self) -> PageLists:
        """Lists of no rows' yet; the next pass writes them all."""
        config = self.full.pool.config
        return PageLists(config.layers, len(self.selections), config.kv_heads, self.full.pool.device)

    def _due(self, b: int) -> bool:
        """Whether the row's pages are to be selected before the next pass."""
        row = self.selections[b]
        refresh = self.setting.refresh
        latest = self.full.observations[self.full.rows[b]]
        if row.policy.observes and latest.mass_LGU is None:
            return False  # nobody had asked: so it was with a row whose batch decoded plainly before it came here
        news = latest.passes - (row.pages.passes if row.pages else 0)
        if row.pages is None:
            return news > 0
        if refresh is None:
            return news > 0 and row.refused
        return 0 < refresh <= news

    def _select(self, b: int) -> None:
        """Select a row's pages anew, by its policy."""
        row = self.selections[b]
        full = self.full
        at = self.full.rows[b]
        chunk = self.setting.chunk
        budget = self.budget(row.committed)
        passes = full.observations[at].passes
        row.pages = select_pages(
            self.row_units(b), row.committed, budget, row.policy.latest(budget), chunk,
            lambda candidates, picks: row.policy.pick(full, at, chunk, candidates, picks), passes,
        )  # fmt: skip
        if row.pages:
            row.refused = False

    def row_units(self, b: int) -> Tensor:
        """All pages of a row, as units (U)."""
        row = self.full.rows[b]
        pool = self.full.pool
        return pool.units(range(row, row + 1), self.unit)[0, : len(pool.tables[row]) * (PAGE // self.unit)]

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, PageTable]]:
        """Page tables of the layers in a pass: some see everything, the others the selected pages and the window."""
        layers = self.full.pool.config.layers
        unit = self.unit
        committed = [row.committed for row in self.selections]
        everything = PageTable(self.full.pool.units(self.full.rows, unit), starts, counts, unit, coarse=committed)
        if not any(row.pages for row in self.selections):
            return by_window(self.full.pool, everything, self.full.rows)
        for b, (row, start, count) in enumerate(zip(self.selections, starts, counts, strict=True)):
            window = range(row.window_start // unit, -(-(start + count) // unit))
            self._lists.show(b, row.pages.units if row.pages else None, self.row_units(b), window)
        hidden = [row.window_start - row.pages.tokens if row.pages else 0 for row in self.selections]
        firsts, coarse = ([n - gap for n, gap in zip(each, hidden, strict=True)] for each in (starts, committed))
        searched = replace(everything, search=self._search())
        views: list[tuple[int, PageTable]] = []
        windows = self.full.pool.config.windows
        see = windowed(self.full.pool, everything, self.full.rows)
        for (kind, window), group in groupby(range(layers), lambda layer: (self._kind(layer), windows[layer])):
            some = list(group)
            units_LBGU = self._lists.units_LBGU[some[0] : some[-1] + 1]
            selected = PageTable(units_LBGU, firsts, counts, unit, coarse=coarse)
            views.append((len(some), {"all": see(window), "found": searched, "selected": selected}[kind]))
        return views

    def _kind(self, layer: int) -> str:
        everything = layer in self.full_layers or self.full.pool.config.windows[layer]
        return "all" if everything else "found" if layer in self.searched_layers else "selected"

    def _search(self) -> Search:
        """Between the sinks and the window, of rows that do not see everything."""
        unit = self.unit
        sinks = PAGE // self.unit
        rows = [
            (sinks, row.window_start // unit, max(row.pages.tokens, row.window_start // FOUND) // unit - sinks)
            if row.pages
            else (0, 0, 0)
            for row in self.selections
        ]
        return Search(*map(list, zip(*rows, strict=True)))
