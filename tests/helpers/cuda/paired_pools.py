"""The same texts in two pools, one with its pages on the host: results of all passes must be equal.

Kernels are replaced by their torch references, so that hundreds of passes take seconds and the test judges only page
places. All memory is NaN until it is written. Sums differ in their last bit by how they are cut, so two pages may tie
in one pool and not in the other: both sides read the selection of the first one.
Shape suffixes as in backends/interface.py.
"""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.lower_view import lower_view
from triforce.backends import dispatch
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.offload.kv import TritonOffloadedKV
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import PAGE, OffloadLayout
from triforce.bench import shapes
from triforce.kvcache import Budget, FullView, PagePool, RetrievalConfig, RetrievalView
from triforce.kvcache.offload_sizing import CudaKVSizing
from triforce.kvcache.page_store import HostStore
from triforce.kvcache.selection import POLICIES
from triforce.kvcache.views.full import AttentionObservation
from triforce.ragged import ints

VOCAB = 50
CAPACITY = 288
ROWS = 2
LAYERS = 3
SHAPE = shapes.ModelShape(32, 48, LAYERS, heads=4, kv_heads=2, vocab=VOCAB, head_dim=8)
PAGES = ROWS * CAPACITY // PAGE
WRITTEN_PAGES = 9
READ = 40
"""Prompts of more tokens are prefilled layer by layer."""


def room(decoder: Decoder, resident_layers: int, written_pages: int = WRITTEN_PAGES) -> OffloadLayout:
    """Return a layout of `resident_layers` whole layers, with so little room for others that pages evict each other."""
    needs = CudaKVSizing(decoder.config, 4, PAGES, ROWS, 30, Budget(48), 0, "cpu", 0)
    store = HostStore(needs.store_bytes(resident_layers))
    layer_pages = written_pages * decoder.config.kv_heads
    store.memory.view(np.float32).fill(np.nan)
    frames = resident_layers * needs.buffer_frames + (LAYERS - resident_layers) * (
        decoder.config.kv_heads + layer_pages + needs.selected_frames
    )
    return OffloadLayout(store, needs.page_bytes, frames, 2, needs.buffer_frames, resident_layers, layer_pages)


class Side:
    """One of the pools, with a full view and a lower view."""

    def __init__(self, decoder: Decoder, layout: OffloadLayout | None, selection: str) -> None:
        self.decoder = decoder
        self.selection = selection
        self.pool = PagePool(decoder.config, ROWS, PAGES, "float32", layout=layout)
        memory = self.pool.kv
        assert type(memory) is (TritonOffloadedKV if layout else TritonKV)
        tensors = [memory.keys_LGSD, memory.values_LGSD]
        for tensor in tensors + (
            list(memory.manager.layout.frame_memories) if isinstance(memory, TritonOffloadedKV) else []
        ):
            tensor.fill_(torch.nan)
        self.full = FullView(self.pool)
        self.look()

    def look(self, layers: frozenset[int] = frozenset()) -> None:
        setting = RetrievalConfig(Budget(48), searched_layers=layers)
        self.lower = lower_view(self.full, POLICIES[self.selection], setting)

    def begin(self, b: int, ids: list[int]) -> list[Tensor]:
        """Prefill another text in row b; return its logits."""
        self.pool.release(b)
        self.pool.reserve(b, CAPACITY)
        self.full.observations[b] = AttentionObservation()
        self.look(self.lower.full_layers)
        view = self.full.row(b)
        observed = []
        while (span := view.resume(len(ids)))[0] < span[1]:
            start, stop = span
            count_1 = ints([stop - start])
            if self.pool.offloaded and stop - start > READ:
                list(self.decoder.read_by_layer(ints([ids[start:stop]]), count_1, view))
            else:
                last_11 = ints([[stop - start - 1]])
                logits_1JV = self.decoder(ints([ids[start:stop]]), count_1, view, last_11)
                observed = [logits_1JV]
        return observed

    def feed(self, view: FullView | RetrievalView, rows: list[list[int]]) -> list[Tensor]:
        """Run one pass; return the logits of real tokens, and their mass."""
        counts = ints([len(row) for row in rows])
        width = max(map(len, rows))
        ids_BT = ints([row + [0] * (width - len(row)) for row in rows])
        logits_BTV = self.decoder(ids_BT, counts, view)
        observed = [logits_BTV[b, :count] for b, count in enumerate(counts)]
        if view is self.full:
            observed += [mass for sight in self.full.observations if (mass := sight.mass_LGU) is not None]
        return observed

    def cut(self, lengths: list[int]) -> None:
        self.full.rewind(ints(lengths))
        self.lower.rewind(ints(lengths))


class Selections:
    """Selections of the first side in order; the second side must have equal scores but for rounding."""

    def __init__(self) -> None:
        self._made: deque[tuple[Tensor, Tensor]] = deque()

    def make(self, scores_GN: Tensor, candidates: range, picks: int) -> Tensor:
        ids_GP = _best(scores_GN, candidates, picks)
        self._made.append((scores_GN[:, candidates.start : candidates.stop], ids_GP))
        return ids_GP

    def follow(self, scores_GN: Tensor, candidates: range, picks: int) -> Tensor:
        expected_GN, ids_GP = self._made.popleft()
        assert_close(scores_GN[:, candidates.start : candidates.stop], expected_GN)
        assert ids_GP.shape[1] == picks
        return ids_GP


_best = dispatch.top_columns


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


class PairedPools:
    """Both pools, with random actions and a comparison of all results."""

    def __init__(self, layout: OffloadLayout, seed: int, selection: str = "observed") -> None:
        self.generator = Random(seed)
        decoder = shapes.decoder("paired", CAPACITY, "float32")
        self.sides = [Side(decoder, None, selection), Side(decoder, layout, selection)]
        self.passes = 0

    def same(self, method: str, *args: object, of: str = "") -> None:
        selections = Selections()
        observed = []
        for side, select in zip(self.sides, (selections.make, selections.follow), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dispatch, "top_columns", select)
                observed.append(getattr(side, method)(*([getattr(side, of)] if of else []), *args) or [])
        for plain, offloaded in zip(*observed, strict=True):
            assert_close(offloaded, plain)
        self.passes += 1

    def ids(self, count: int) -> list[int]:
        return [self.generator.randrange(VOCAB) for _ in range(count)]

    def run(self, steps: int) -> None:
        for b in range(ROWS):
            self.same("begin", b, self.ids(self.generator.randrange(60, 200)))
        for _ in range(steps):
            actions = ["round", "round", "round", "cut", "another", "fork", "prefer", "look"]
            getattr(self, self.generator.choice(actions))()

    @property
    def lengths(self) -> list[int]:
        return self.sides[0].pool.lengths_B.tolist()

    def round(self) -> None:
        """Feed draft tokens to the lower view, feed the full view, and cut some rows by one token."""
        if max(self.lengths) > CAPACITY - 30:
            return self.another()
        for _ in range(self.generator.randrange(3)):
            self.same("feed", [self.ids(self.generator.randrange(4)) or [1] for _ in range(ROWS)], of="lower")
        self.same("feed", [self.ids(self.generator.choice([1, 3, 9])) for _ in range(ROWS)], of="full")
        self.same("cut", [length - self.generator.randrange(2) for length in self.lengths])

    def cut(self) -> None:
        self.same("cut", [max(1, length - self.generator.choice([0, 1, 20, 60])) for length in self.lengths])

    def another(self) -> None:
        self.same("begin", self.generator.randrange(ROWS), self.ids(self.generator.randrange(20, 200)))

    def fork(self) -> None:
        """Fork row 1 into row 0."""
        for side in self.sides:
            side.pool.release(0)
            side.pool.reserve(0, CAPACITY)
            side.full.fork(1, 0)
            side.look(side.lower.full_layers)

    def prefer(self) -> None:
        self.sides[1].pool.offloaded.prefer([self.generator.randrange(LAYERS)])

    def verify(self, width: int) -> None:
        """Run one pass of the lower view, and one of the full view that verifies it."""
        self.same("feed", [self.ids(width) for _ in range(ROWS)], of="lower")
        self.same("feed", [self.ids(width) for _ in range(ROWS)], of="full")

    def look(self) -> None:
        """Let the lower view read random layers in full."""
        searched_layers = frozenset(self.generator.sample(range(LAYERS), self.generator.randrange(2)))
        for side in self.sides:
            side.look(searched_layers)
