"""The view of an EAGLE head: entries of sinks and a window, in the pages of the full view's rows.

Shape suffixes: B rows, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from torch import Tensor

from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, PageTable
from triforce.kvcache.views.full import FullView
from triforce.kvcache.views.streaming import steps_in_place
from triforce.ragged import Ints, ints, to_device


class EagleHeadView:
    """A lower view of a `FullView`: each entry sees the first `sinks` entries and the `window` that end with itself.

    Passes of the tiers above leave entries of all tokens that they feed. So there is nothing to catch up with: its own
    length never falls behind the committed one, and what it feeds beyond stays its own until it is written anew.
    Distances to the sinks are those of `StreamingView`. reach: tokens that it may be ahead of the committed ones.
    """

    def __init__(self, full: FullView, sinks: int, window: int, reach: int) -> None:
        memory = full.pool.eagle_memory
        assert memory is not None, "a pool for an EAGLE head has room for its entries"
        self.full = full
        self.memory = memory
        self.kv = memory.kv
        self.sinks = sinks
        self.window = window
        self.unit = memory.unit
        self._ahead_B = np.zeros(len(full.rows), dtype=np.int64)
        self._length = ceil((sinks + window + reach) / self.unit) + 2  # of a list, in units
        self._listed: tuple[list[int], Tensor, Tensor] | None = None  # for how many dropped, of which tables

    @property
    def lengths_B(self) -> Ints:
        return np.maximum(self._ahead_B, self.full.lengths_B)

    def steps(self, counts_B: Ints, most: int) -> int:
        """Count tokens, at most `most`, to feed one by one behind a pass of `counts_B` before its lists must move."""
        return steps_in_place(self.lengths_B, counts_B, self.sinks + self.window - 1, self.unit, most)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        starts = self.lengths_B.tolist()
        rows = self.full.rows
        dropped = [max(0, start - self.window + 1 - self.sinks) // self.unit for start in starts]
        firsts = [start - drop * self.unit for start, drop in zip(starts, dropped, strict=True)]
        units_BU = self._lists(dropped)
        lists = PageTable(units_BU, firsts, counts_B.tolist(), self.unit, self.sinks, self.window)
        tables = self.full.pool.tables[rows.start : rows.stop]
        return ForwardBatch(starts, [(1, lists)], tables=tables)

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        self._ahead_B = self.lengths_B + batch.views[0][1].counts

    def rewind(self, lengths_B: Ints) -> None:
        self._ahead_B = np.minimum(self._ahead_B, lengths_B)

    def resume(self, length: int) -> tuple[int, int]:
        """The exact view sees to it."""
        return length, length

    def row(self, b: int) -> EagleHeadView:
        """Return this view: there is nothing to feed through one row."""
        return self

    def fork(self, source: int, row: int) -> None:
        """The exact view copies entries with its pages."""

    def select(self, rows: Sequence[int]) -> None:
        self._ahead_B = self._ahead_B[list(rows)]

    def join(self, other: EagleHeadView) -> None:
        self._ahead_B = np.concatenate((self._ahead_B, other._ahead_B))

    def swap_out(self, b: int) -> int:
        """Return how far a row is ahead: between two proposals not at all."""
        return int(self._ahead_B[b])

    def swap_in(self, b: int, held: int) -> None:
        self._ahead_B[b] = held

    def _lists(self, dropped: list[int]) -> Tensor:
        """Each row's sinks, and of its own what follows the units dropped behind these, int32 (B, U)."""
        pool = self.full.pool
        rows = self.full.rows
        if self._listed is None or self._listed[0] != dropped or self._listed[1] is not pool.pages_BP:
            sinks = self.sinks // self.unit
            all_BU = pool.units(rows, self.unit)
            at_BU = np.arange(self._length) + np.where(np.arange(self._length) < sinks, 0, ints(dropped)[:, None])
            seen_BU = to_device(np.minimum(at_BU, all_BU.shape[1] - 1), all_BU.device)
            self._listed = dropped, pool.pages_BP, all_BU.gather(1, seen_BU)
        return self._listed[2]
