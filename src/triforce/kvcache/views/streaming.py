"""The draft's view: attention sinks and a sliding window, of constant size (StreamingLLM, Xiao et al. 2024).

Shape suffixes: B rows, T tokens fed in one pass, J scored columns, N tokens, U units (see `kernel_api.PageTable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import ceil, gcd

import numpy as np

from triforce.arrays import Array, DType
from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, PageTable
from triforce.errors import CacheError
from triforce.kvcache.views.full import LayerKV, host_copies, write_layers
from triforce.model.config import ModelConfig
from triforce.model.kv_rows import kv_dtype
from triforce.ragged import Ints

Ring = tuple[list[LayerKV], int, int, int]
"""Contents of a row: K and V of its sinks and ring for each layer, its length, its written length, its oldest token."""


class StreamingView:
    """View in which each token sees the first `sinks` tokens and the `window` tokens that end with itself.

    Rotary distances count places in [sinks | window], so that they stay within the range the draft was trained on.
    Between two tokens of the window they are the true distances; between a query and the sinks they are shorter. So
    keys are stored rotated by their true position and each query is rotated twice, instead of rotating every key in
    every pass. The tokens that a token sees do not depend on how the text was cut into passes.

    A ring of keys has `slack` slots more than the window, so that up to `slack` rejected tokens can be dropped.
    read_tokens: latest tokens of a text that `resume` feeds; None: all that can reach the window through any layer.
    Each row has pages of its own for its sinks and ring; the memory has such pages for `rows` rows. `new_rows` gives
    other rows of the same memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        sinks: int = 16,
        window: int = 496,
        slack: int = 128,
        dtype: DType = "float32",
        device: str = "cpu",
        read_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.read_tokens = config.layers * window if read_tokens is None else read_tokens
        self.sinks = sinks
        self.window = window
        self.slack = slack
        self.unit = gcd(sinks, PAGE)
        self.ring = self.unit * (
            1 + ceil((window + slack) / self.unit)
        )  # one unit more, as lists begin at a whole unit
        self.pages = ceil((sinks + self.ring) / PAGE)
        self.kv = dispatch.memory(config, rows * self.pages, dtype, device, self.unit)
        self.dtype = kv_dtype(config, dtype)
        self.free_rings = list(range(rows))
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        if rows > len(self.free_rings):
            raise CacheError(f"the draft's KV has room for {len(self.free_rings)} more rows, not for {rows}")
        self.rows = range(rows)
        self.rings = self.free_rings[:rows]
        """Ring of each row. Ring r has `self.pages` pages from page 1 + r * self.pages on."""
        del self.free_rings[:rows]
        self.lengths_B = np.zeros(rows, dtype=np.int64)
        self.written_lengths = [0] * rows
        self.oldest_tokens = [self.sinks] * rows
        """Position of each row's oldest token after its sinks. Tokens between the two were skipped."""
        self._forget_lists()

    def _forget_lists(self) -> None:
        self._dropped_units: list[int] = []
        self._units_BU = self.kv.array(np.zeros((len(self.rows), 0), np.int32))

    def new_rows(self, rows: int) -> StreamingView:
        """Return `rows` empty rows of the same memory. Raises CacheError where it has too few free rows."""
        new_view = copy(self)
        new_view._set_rows(rows)
        return new_view

    def select(self, rows: Sequence[int]) -> None:
        self.free_rings += [ring for b, ring in enumerate(self.rings) if b not in rows]
        kept = [[values[b] for b in rows] for values in (self.rings, self.written_lengths, self.oldest_tokens)]
        self.rings, self.written_lengths, self.oldest_tokens = kept
        self.lengths_B = self.lengths_B[list(rows)]
        self.rows = range(len(rows))
        self._forget_lists()

    def join(self, other: StreamingView) -> None:
        self.rings += other.rings
        self.written_lengths += other.written_lengths
        self.oldest_tokens += other.oldest_tokens
        self.lengths_B = np.concatenate((self.lengths_B, other.lengths_B))
        self.rows = range(len(self.rings))
        self._forget_lists()

    def steps(self, counts_B: Ints, limit: int) -> int:
        """Return how many single tokens can follow a pass of `counts_B` over the same page table, up to `limit`."""
        return steps_in_place(self.lengths_B, counts_B, self.sinks + self.window - 1, self.unit, limit)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        # Computed on the host: a pass of the draft costs less than a dozen tensor operations.
        starts = self.lengths_B.tolist()
        counts = counts_B.tolist()
        oldest_tokens = self.oldest_tokens[self.rows.start : self.rows.stop]
        written_lengths = [
            max(self.written_lengths[b], start + n) for b, start, n in zip(self.rows, starts, counts, strict=True)
        ]
        spans = zip(oldest_tokens, starts, counts, written_lengths, strict=True)
        if any(
            count and (end - start > self.slack or start < oldest > self.sinks) for oldest, start, count, end in spans
        ):
            raise CacheError(
                f"a streaming cache with slack {self.slack} cannot hold draft tokens this far beyond its text"
            )
        self.written_lengths[self.rows.start : self.rows.stop] = written_lengths
        dropped_units = [
            (max(oldest, start - self.window + 1) - self.sinks) // self.unit
            for oldest, start in zip(oldest_tokens, starts, strict=True)
        ]
        if dropped_units != self._dropped_units:
            self._dropped_units = dropped_units
            self._units_BU = self._units(dropped_units)
        list_starts = [start - drop * self.unit for start, drop in zip(starts, dropped_units, strict=True)]
        page_table = PageTable(self._units_BU, list_starts, counts, self.unit, self.sinks, self.window)
        return ForwardBatch(starts, [(self.config.layers, page_table)])

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        self.lengths_B += batch.views[0][1].counts

    def rewind(self, lengths_B: Ints) -> None:
        np.minimum(self.lengths_B, lengths_B, out=self.lengths_B)

    def resume(self, length: int) -> tuple[int, int]:
        """Return the next range of the prompt to feed.

        Only the sinks and the latest `read_tokens` tokens are fed, with up to a unit more, so that the reading does not
        grow with the text.
        """
        fed_tokens = int(self.lengths_B[0])
        (b,) = self.rows
        lost_tokens = self.written_lengths[b] - fed_tokens > self.slack
        if lost_tokens or fed_tokens < self.oldest_tokens[b]:  # the rewind lost the window; sinks are never lost
            fed_tokens = min(fed_tokens, self.sinks)
        if fed_tokens < self.sinks:
            start = fed_tokens
            stop = min(self.sinks, length)
        else:
            needed_units = (length - self.sinks - self.read_tokens) // self.unit
            start = max(fed_tokens, self.sinks + needed_units * self.unit)
            stop = min(start + self.slack, length)
        if start > fed_tokens or start <= self.sinks:
            self.oldest_tokens[b] = max(start, self.sinks)
        self.lengths_B[:] = start
        self.written_lengths[b] = start
        return start, stop

    @property
    def most_read(self) -> int:
        """Most tokens of a text that `resume` feeds, up to a unit."""
        return self.sinks + self.read_tokens

    def row(self, b: int) -> StreamingView:
        row_view = copy(self)
        row_view.rows = self.rows[b : b + 1]
        row_view.lengths_B = self.lengths_B[b : b + 1]
        row_view._dropped_units = []
        return row_view

    def fork(self, source: int, row: int) -> None:
        """Copy the contents of row `source` into row `row`."""
        self.swap_in(row, self._contents(source, self._ring(source)))

    def swap_out(self, b: int) -> Ring:
        """Return a copy of a row's contents on the host, for `swap_in`."""
        return self._contents(b, host_copies(self._ring(b)))

    def swap_in(self, b: int, ring: Ring) -> None:
        """Restore a swapped row's contents into empty row b."""
        layers, self.lengths_B[b], self.written_lengths[b], self.oldest_tokens[b] = ring
        slots_N = self.kv.array(np.arange(self.pages * PAGE) + self._first_slot(b))
        write_layers(self.kv, slots_N, enumerate(layers))

    def _contents(self, b: int, layers: list[LayerKV]) -> Ring:
        return layers, int(self.lengths_B[b]), self.written_lengths[b], self.oldest_tokens[b]

    def _first_slot(self, b: int) -> int:
        return (self.rings[b] * self.pages + 1) * PAGE

    def _ring(self, b: int) -> list[LayerKV]:
        return [self.kv.view(n, self._first_slot(b), self.pages * PAGE) for n in range(self.config.layers)]

    def _units(self, dropped_units: list[int]) -> Array:
        """Return each row's sinks, and then its ring from the oldest visible unit on, as units: int32 (B, U)."""
        sinks = self.sinks // self.unit
        ring = self.ring // self.unit
        first_units = [(self.rings[b] * self.pages + 1) * PAGE // self.unit for b in self.rows]
        rows = [
            [*range(first_unit, first_unit + sinks), *(first_unit + sinks + (drop + i) % ring for i in range(ring))]
            for first_unit, drop in zip(first_units, dropped_units, strict=True)
        ]
        return self.kv.array(np.array(rows, dtype=np.int32))


def steps_in_place(lengths_B: Ints, counts_B: Ints, first_move: int, unit: int, limit: int) -> int:
    """Return how many tokens can be fed after a pass of `counts_B` before a page list changes, at most `limit`.

    The list of a row drops a unit at length `first_move`, and after every `unit` tokens from there on.
    """
    dropped_B = np.maximum(lengths_B - first_move, 0) // unit
    remaining_B = (dropped_B + 1) * unit + first_move - (lengths_B + counts_B)
    return max(min(limit, int(remaining_B[counts_B > 0].min())), 0)
