"""DiskPrefixes: the disk cache of one engine. KV of whole segments of texts goes from pages to entries, and back.

A segment is named by its tokens and all before them, by what computed it, and by the scope of the request. So a name
that is found stands for the very KV that a prefill would give, and one scope cannot name what another has read.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE
from triforce.disk_cache.entry import FORMAT, Entry, Part
from triforce.disk_cache.entry_store import Use
from triforce.disk_cache.folder import LOG
from triforce.disk_cache.write_behind import DiskCache
from triforce.errors import CacheError
from triforce.kvcache.disk_parts import IDS, WINDOWS, ids_part, part_of, parts_of
from triforce.kvcache.feature_memory import FEATURES
from triforce.kvcache.page_owners import PrefixPages
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.full import LayerKV
from triforce.kvcache.views.streaming import StreamingView
from triforce.ragged import Ints

SEGMENT = 256
"""Tokens of a segment."""
MOST_WAITING = 4096
"""Segments that wait, a million tokens."""
STEPS = 15
"""Times as long as a copy took, steps of texts go on before the next."""
ID_BYTES = 4
"""Of a token id in an entry."""

Pages = Callable[[int, int], PrefixPages | None]
"""Pages that hold tokens [start, stop) of a text, both multiples of `PAGE`; None where they are gone."""


class KVProfile(NamedTuple):
    """Identity of what computes KV: with another, bits may differ."""

    model: str
    """The name that people know the target by; it is shown, and decides nothing."""
    target: str
    """The target's fingerprint: weights, rotation, dtype; and that of a draft that reads its states."""
    draft: str
    """The draft's fingerprint, and the bits of its weights; or nothing."""
    kernels: str
    """Kernels, their level, and their build."""


@dataclass(slots=True)
class WaitingSegment:
    """A segment that is to be written once there is room in the queue.

    after: the name of what it follows. cost: seconds that a prefill took for a token. layers: its KV, if it lies in no
    pages. ids: of whole pages in the place of a segment, the latest ones of their name. windows: whether it is KV of
    layers whose pages are apart, as they have a window, and not that of the others.
    """

    name: str
    after: str
    index: int
    use: Use
    cost: float
    pages: Pages | None = None
    layers: list[LayerKV] | None = None
    ids: Ints | None = None
    windows: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that it has."""
        return SEGMENT if self.ids is None else len(self.ids)


class DiskPrefixes:
    """Names and entries of the KV in a pool. It is the engine's thread that calls it; files are written by another.

    whole: tokens in a multiple of which prompts share their beginnings.
    """

    def __init__(self, cache: DiskCache, profile: KVProfile, pool: PagePool, whole: int) -> None:
        self._cache, self.store, self._queue, self.pool = cache, cache.store, cache.queue, pool
        self.whole, self._profile = max(whole, SEGMENT), profile
        self._waiting: deque[WaitingSegment] = deque()
        self._pause_until, self._failures = 0.0, self._queue.failures
        self.losses = 0
        """Times that segments were given up: of texts that began before, what follows would be found by nobody."""

    def root(self, scope: str) -> str:
        """Return the name that the first segment of a text follows."""
        shapes = [SEGMENT, PAGE, self.whole, *self.pool.least, *self.pool.layers(windows=True)]
        facts = [FORMAT, shapes, self._profile.target, self._profile.kernels, str(self.pool.dtype)]
        return self.store.name(b"root", json.dumps(facts).encode(), scope.encode())

    def draft_name(self, name: str, view: StreamingView) -> str:
        """Return the name of what the draft sees at the end of the segment of that name."""
        facts = [self._profile.draft, view.sinks, view.window, view.unit, str(view.dtype)]
        return self.store.name(b"draft", json.dumps(facts).encode(), name.encode())

    def windows_name(self, name: str) -> str:
        """Return the name of what layers with a window have of the segment of that name."""
        return self.store.name(b"windows", name.encode())

    def rest_name(self, name: str) -> str:
        """Return the name of the pages that the latest text has behind the segment of that name."""
        return self.store.name(b"rest", name.encode())

    def add(self, segment: WaitingSegment) -> None:
        """Let a segment wait to be written behind the answer, unless a disk is so slow that too many wait."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(segment)
        else:
            self.losses += 1

    def latest(self, scope: str) -> list[Ints]:
        """Return token ids of the latest texts of a scope, the oldest first, as any process has kept them."""
        entry = self.store.read(self._latest_name(scope))
        held = [part.data for part in entry.parts.values() if len(part.data) % ID_BYTES == 0] if entry else []
        return [np.frombuffer(data, dtype=np.int32).astype(np.int64) for data in held]

    def keep_latest(self, scope: str, texts: Sequence[Ints]) -> None:
        """Keep token ids of the latest texts of a scope in the place of others, if there is room to queue them."""
        parts = {}
        for number, text in enumerate(texts):
            data = memoryview(bytearray(text.astype(np.int32).tobytes()))
            parts[str(number)] = Part("U8", [len(data)], data)
        entry = Entry({"kind": "latest", "model": self._profile.model}, parts)
        write = partial(self.store.write, self._latest_name(scope), entry, Use(), 0, replace=True)
        self._queue.offer(write, entry.bytes)

    def _latest_name(self, scope: str) -> str:
        return self.store.name(b"latest", self.root(scope).encode())

    def write_some(self) -> bool:
        """Copy a segment that waits to the queue, if there is room. Returns whether others wait, and there was room."""
        if self._failures != self._queue.failures:
            self._failures = self._queue.failures
            self.forget()
        while self._waiting:
            first = self._waiting[0]
            if first.ids is None and self.store.folder.has(first.name):
                size, write = 1, partial(self.store.touch, first.name, first.use, first.index)
            else:
                size = self._bytes(first)
                if not self._queue.has_room(size):
                    return False
                if (parts := self._parts(first)) is None:
                    self._waiting.popleft()  # its pages were needed, and so are those of what follows
                    continue
                entry, replace = self._entry(first, parts), first.ids is not None
                write = partial(self.store.write, first.name, entry, first.use, first.index, replace=replace)
            if not self._queue.offer(write, size):
                return False
            self._waiting.popleft()
            if size > 1:
                return bool(self._waiting)
        return False

    def write_between_steps(self) -> None:
        """Copy a segment, if texts that wait for their next step lose but a small share of their time by it."""
        if self._waiting and (began := perf_counter()) >= self._pause_until:
            self.write_some()
            self._pause_until = perf_counter() + STEPS * (perf_counter() - began)

    def write_all(self, stop: Callable[[], object]) -> None:
        """Copy all segments that wait to the queue, as it gets room, until `stop` says so or it takes no more."""
        while self._waiting and not stop():
            if not self.write_some() and self._waiting and not self._queue.wait():
                return

    def forget(self) -> None:
        """Write nothing of what waits: nobody knows what its pages hold, or what comes before it is lost."""
        self.losses += 1
        self._waiting.clear()

    def _bytes(self, segment: WaitingSegment) -> int:
        if segment.layers:
            return sum(t.numel() * t.itemsize for layer in segment.layers for t in layer)
        held = segment.tokens * self.pool.token_bytes * len(self._layers(segment)) // self.pool.config.layers
        features = None if segment.windows else self.pool.features
        return held + (segment.tokens * features.token_bytes if features else 0)

    def _layers(self, segment: WaitingSegment) -> list[int]:
        """Return the layers of which an entry has KV."""
        windows = self.pool.layers(windows=True)
        others = [] if segment.windows else self.pool.layers(windows=False)
        return windows + others if segment.windows or segment.ids is not None else others

    def _parts(self, segment: WaitingSegment) -> dict[str, Part] | None:
        """Return what an entry holds: KV of its layers; None where pages are gone or cannot be read."""
        if segment.layers:
            return parts_of(segment.layers)
        start = segment.index * SEGMENT
        pages = segment.pages(start, start + segment.tokens) if segment.pages else None
        if pages is None:
            return None
        parts = dict[str, Part]()
        try:
            if not segment.windows:
                parts |= self._parts_without_window(pages.pages)
            if self.pool.windows and (segment.windows or segment.ids is not None):
                if len(pages.window_pages) < len(pages.pages) or not all(pages.window_pages):
                    return None
                parts |= parts_of(self._read(self.pool.layers(windows=True), pages.window_pages), WINDOWS)
        except (CacheError, MemoryError, RuntimeError) as error:  # offloaded pages, or no memory for copies of them
            LOG.warning("disk cache: a segment is not kept: %s", error)
            return None
        if segment.ids is not None:
            parts[IDS] = ids_part(segment.ids)
        return parts

    def _parts_without_window(self, pages: Sequence[int]) -> dict[str, Part]:
        features = self.pool.features
        held = zip(FEATURES, features.read(self._slots(pages)), strict=True) if features else ()
        layers = self._read(self.pool.layers(windows=False), pages)
        return parts_of(layers) | {name: part_of([each]) for name, each in held}

    def _read(self, layers: Sequence[int], pages: Sequence[int]) -> list[LayerKV]:
        slots_N = self._slots(pages)
        return [self.pool.kv.read(layer, slots_N) for layer in layers]

    def _slots(self, pages: Sequence[int]) -> Tensor:
        pages_P = torch.tensor(pages, dtype=torch.long, device=self.pool.device)
        return (pages_P[:, None] * PAGE + torch.arange(PAGE, device=self.pool.device)).flatten()

    def _entry(self, segment: WaitingSegment, parts: dict[str, Part]) -> Entry:
        kind = "draft" if segment.layers else "windows" if segment.windows else "kv"
        facts = {
            "kind": kind if segment.ids is None else "rest",
            "model": self._profile.model,
            "profile": self._profile.kernels,
            "after": segment.after,
            "segment": str(segment.index),
            "tokens": str(segment.tokens),
            "seconds_per_token": f"{segment.cost:.3g}",
        }
        return Entry(facts, parts)
