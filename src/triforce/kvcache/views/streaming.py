"""The draft's view: attention sinks and a sliding window, of constant size (StreamingLLM, Xiao et al. 2024).

Shape suffixes: B rows, T tokens fed in one pass, J scored columns, N tokens, U units (see `kernel_api.PageTable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import ceil, gcd

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, PageTable
from triforce.backends.kv_rows import kv_dtype
from triforce.errors import CacheError
from triforce.kvcache.views.full import LayerKV, to_host, write_layers
from triforce.model.config import ModelConfig
from triforce.ragged import Ints, to_device

Ring = tuple[list[LayerKV], int, int]
"""K and V of a row's sinks and ring for each layer; its length, and how far it has been written."""


class StreamingView:
    """Each token sees the first `sinks` tokens and the `window` tokens that end with itself.

    Distances are those of the places in [sinks | window], so that they stay inside the range the draft was trained on:
    among the window they are the true ones, and towards the sinks a query stands at its place. So keys are kept
    rotated by their true position and each query is rotated twice, instead of rotating every key in every pass; what
    a token sees does not depend on how the text was cut into passes. A ring with `slack` slots more than the window
    holds the keys, so that as many refused tokens can be forgotten. A row's sinks and ring lie in pages of its own, of
    which there are as many as `rows`; `more` gives other rows of the same memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        sinks: int = 16,
        window: int = 496,
        slack: int = 128,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.sinks = sinks
        self.window = window
        self.slack = slack
        self.unit = gcd(sinks, PAGE)
        self.ring = self.unit * (1 + ceil((window + slack) / self.unit))  # a unit more: lists begin at a whole one
        self.pages = ceil((sinks + self.ring) / PAGE)
        self.kv = dispatch.memory(config, rows * self.pages, dtype, device, self.unit)
        self.dtype = kv_dtype(config, dtype)
        self.device = torch.device(device)
        self.free = list(range(rows))
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        if rows > len(self.free):
            raise CacheError(f"the draft's KV has room for {len(self.free)} more rows, not for {rows}")
        self.rows, self.rings = range(rows), self.free[:rows]
        """Which pages each row has: ring r those from 1 + r * self.pages on."""
        del self.free[:rows]
        self.lengths_B = np.zeros(rows, dtype=np.int64)
        self.highest = [0] * rows
        self._forget_lists()

    def _forget_lists(self) -> None:
        self._dropped: list[int] = []
        self._units_BU = torch.zeros(len(self.rows), 0, dtype=torch.int32, device=self.device)

    def more(self, rows: int) -> StreamingView:
        """Fresh rows of the same memory. Raises CacheError where there are not so many."""
        other = copy(self)
        other._set_rows(rows)
        return other

    def select(self, rows: Sequence[int]) -> None:
        self.free += [ring for b, ring in enumerate(self.rings) if b not in rows]
        self.rings, self.highest = ([each[b] for b in rows] for each in (self.rings, self.highest))
        self.lengths_B = self.lengths_B[list(rows)]
        self.rows = range(len(rows))
        self._forget_lists()

    def join(self, other: StreamingView) -> None:
        self.rings += other.rings
        self.highest += other.highest
        self.lengths_B = np.concatenate((self.lengths_B, other.lengths_B))
        self.rows = range(len(self.rings))
        self._forget_lists()

    def steps(self, counts_B: Ints, most: int) -> int:
        """Count tokens, at most `most`, to feed one by one behind a pass of `counts_B` before its lists must move."""
        return steps_in_place(self.lengths_B, counts_B, self.sinks + self.window - 1, self.unit, most)

    def begin(self, counts_B: Ints, width: int) -> ForwardBatch:
        # On the host: a pass of the draft costs less than a dozen operations on tensors would.
        starts = self.lengths_B.tolist()
        counts = counts_B.tolist()
        ends = [max(self.highest[b], start + n) for b, start, n in zip(self.rows, starts, counts, strict=True)]
        if any(count and end - start > self.slack for start, count, end in zip(starts, counts, ends, strict=True)):
            raise CacheError(
                f"A streaming cache with slack {self.slack} cannot run further ahead of the text; raise `slack`."
            )
        self.highest[self.rows.start : self.rows.stop] = ends
        dropped = [max(0, start - self.window + 1 - self.sinks) // self.unit for start in starts]
        if dropped != self._dropped:
            self._dropped, self._units_BU = dropped, self._units(dropped)
        firsts = [start - drop * self.unit for start, drop in zip(starts, dropped, strict=True)]
        lists = PageTable(self._units_BU, firsts, counts, self.unit, self.sinks, self.window)
        return ForwardBatch(starts, [(self.config.layers, lists)])

    def record(self, batch: ForwardBatch, output: ForwardOutput | None = None) -> None:
        self.lengths_B += batch.views[0][1].counts

    def rewind(self, lengths_B: Ints) -> None:
        np.minimum(self.lengths_B, lengths_B, out=self.lengths_B)

    def resume(self, length: int) -> tuple[int, int]:
        """Skips what cannot reach the window through any layer: the draft's prefill does not grow with the prompt."""
        seen = int(self.lengths_B[0])
        (b,) = self.rows
        if self.highest[b] - seen > self.slack:  # rewound so far that the window is gone; the sinks never are
            seen = min(seen, self.sinks)
        if seen < self.sinks:
            start = seen
            stop = min(self.sinks, length)
        else:
            start = max(seen, length - self.config.layers * self.window)
            stop = min(start + self.slack, length)
        self.lengths_B[:] = start
        self.highest[b] = start
        return start, stop

    def row(self, b: int) -> StreamingView:
        one = copy(self)
        one.rows = self.rows[b : b + 1]
        one.lengths_B = self.lengths_B[b : b + 1]
        one._dropped = []
        return one

    def fork(self, source: int, row: int) -> None:
        """Let a row see what another row has seen."""
        self.swap_in(row, (self._ring(source), int(self.lengths_B[source]), self.highest[source]))

    def swap_out(self, b: int) -> Ring:
        """A copy of what a row holds, for `swap_in`."""
        return to_host(self._ring(b)), int(self.lengths_B[b]), self.highest[b]

    def swap_in(self, b: int, ring: Ring) -> None:
        """Let a fresh row go on as the one that was swapped out."""
        layers, self.lengths_B[b], self.highest[b] = ring
        write_layers(
            self.kv, torch.arange(self.pages * PAGE, device=self.device) + self._first_slot(b), enumerate(layers)
        )

    def visible(self, length: int) -> int:
        """Return how many tokens a row keeps of a text of `length`: its sinks and its window."""
        return min(length, self.sinks + self.window)

    def window_of(self, b: int) -> list[LayerKV]:
        """Return copies of what row b sees: K and V of its sinks and its window for each layer, (G, N, D)."""
        slots_N = self._visible_slots(b, int(self.lengths_B[b]))
        return to_host(self.kv.read(n, slots_N) for n in range(self.config.layers))

    def start_at(self, b: int, length: int, layers: list[LayerKV]) -> None:
        """Let a fresh row go on as one that has seen `length` tokens. layers: what that one saw, see `window_of`."""
        write_layers(self.kv, self._visible_slots(b, length), enumerate(layers))
        self.lengths_B[b] = self.highest[b] = length

    def _visible_slots(self, b: int, length: int) -> Tensor:
        """Slots (N) of the sinks and the window of a row that has seen `length` tokens."""
        sinks_N = torch.arange(min(self.sinks, length), device=self.device)
        window_N = torch.arange(max(self.sinks, length - self.window), length, device=self.device)
        return self._first_slot(b) + torch.cat([sinks_N, self.sinks + (window_N - self.sinks) % self.ring])

    def _first_slot(self, b: int) -> int:
        return (self.rings[b] * self.pages + 1) * PAGE

    def _ring(self, b: int) -> list[LayerKV]:
        return [self.kv.view(n, self._first_slot(b), self.pages * PAGE) for n in range(self.config.layers)]

    def _units(self, dropped: list[int]) -> Tensor:
        """Each row's sinks, and then its ring from the oldest unit visible on, int32 (B, U)."""
        sinks = self.sinks // self.unit
        ring = self.ring // self.unit
        firsts = [(self.rings[b] * self.pages + 1) * PAGE // self.unit for b in self.rows]
        rows = [
            [*range(first, first + sinks), *(first + sinks + (drop + i) % ring for i in range(ring))]
            for first, drop in zip(firsts, dropped, strict=True)
        ]
        return to_device(np.array(rows, dtype=np.int32), self.device)


def steps_in_place(lengths_B: Ints, counts_B: Ints, first: int, unit: int, most: int) -> int:
    """Count tokens, at most `most`, to feed behind a pass before a list moves: at `first`, and each unit behind it."""
    dropped_B = np.maximum(lengths_B - first, 0) // unit
    left_B = (dropped_B + 1) * unit + first - (lengths_B + counts_B)
    return max(min(most, int(left_B[counts_B > 0].min())), 0)
