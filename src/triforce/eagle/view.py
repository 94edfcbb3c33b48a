"""View of an EAGLE head's memory: entries of sinks and a window, in the pages of the full view's rows.

Shape suffixes: B rows, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from triforce.arrays import Array
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, PageTable
from triforce.kvcache.views.full import FullView
from triforce.kvcache.views.streaming import steps_in_place
from triforce.ragged import Ints, ints


class EagleHeadView:
    """Lower view of a `FullView`: each entry sees the first `sinks` entries and the `window` entries that end with it.

    Passes of the tiers above write entries of all tokens that they feed. So the view has nothing to catch up with: its
    length never falls behind the committed length. Entries that it writes beyond that length are drafts, until a pass
    of an upper tier writes them anew. Distances to the sinks are those of `StreamingView`. reach: tokens that the view
    may be ahead of the committed length.
    """

    def __init__(self, full: FullView, sinks: int, window: int, reach: int) -> None:
        memory = full.pool.eagle_memory
        assert memory is not None, "a pool for an EAGLE head has memory for its entries"
        self.full = full
        self.memory = memory
        self.kv = memory.kv
        self.sinks = sinks
        self.window = window
        self.unit = memory.unit
        self._fed_B = np.zeros(len(full.rows), dtype=np.int64)
        self._list_units = ceil((sinks + window + reach) / self.unit) + 2  # of a page list, in units
        self._cached_lists: tuple[list[int], Array, Array] | None = None  # dropped units and tables (the key), lists

    @property
    def lengths_B(self) -> Ints:
        return np.maximum(self._fed_B, self.full.lengths_B)

    def steps(self, counts_B: Ints, limit: int) -> int:
        """Return how many single tokens may follow a pass of `counts_B` before its lists change, at most `limit`."""
        return steps_in_place(self.lengths_B, counts_B, self.sinks + self.window - 1, self.unit, limit)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts = self.lengths_B.tolist()
        rows = self.full.rows
        dropped = [max(0, start - self.window + 1 - self.sinks) // self.unit for start in starts]
        list_starts = [start - drop * self.unit for start, drop in zip(starts, dropped, strict=True)]
        units_BU = self._lists(dropped)
        page_table = PageTable(units_BU, list_starts, counts_B.tolist(), self.unit, self.sinks, self.window)
        tables = self.full.pool.tables[rows.start : rows.stop]
        return ForwardBatch(starts, [(1, page_table)], tables=tables)

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        self._fed_B = self.lengths_B + batch.views[0][1].counts

    def rewind(self, lengths_B: Ints) -> None:
        self._fed_B = np.minimum(self._fed_B, lengths_B)

    def resume(self, length: int) -> tuple[int, int]:
        """Return an empty range: passes of the full view feed the prompt."""
        return length, length

    def row(self, b: int) -> EagleHeadView:
        """Return this view: no prompt is fed through it."""
        return self

    def fork(self, source: int, row: int) -> None:
        """Copy nothing: the full view copies entries with its pages."""

    def select(self, rows: Sequence[int]) -> None:
        self._fed_B = self._fed_B[list(rows)]

    def join(self, other: EagleHeadView) -> None:
        self._fed_B = np.concatenate((self._fed_B, other._fed_B))

    def swap_out(self, b: int) -> int:
        """Return row b's own length, which between two proposals is not ahead of the committed length."""
        return int(self._fed_B[b])

    def swap_in(self, b: int, swapped_length: int) -> None:
        self._fed_B[b] = swapped_length

    def _lists(self, dropped: list[int]) -> Array:
        """Return each row's page list, int32 (B, U): its units, without the `dropped` ones after the sinks."""
        pool = self.full.pool
        rows = self.full.rows
        if self._cached_lists is None or self._cached_lists[0] != dropped or self._cached_lists[1] is not pool.pages_BP:
            sinks = self.sinks // self.unit
            all_BU = self.kv.array(pool.units(rows, self.unit))  # the pool's memory may be of other kernels
            index_U = np.arange(self._list_units)
            index_BU = index_U + np.where(index_U < sinks, 0, ints(dropped)[:, None])
            visible_BU = self.kv.array(np.minimum(index_BU, all_BU.shape[1] - 1))
            self._cached_lists = dropped, pool.pages_BP, self.kv.xp.take_along_axis(all_BU, visible_BU, axis=1)
        return self._cached_lists[2]
