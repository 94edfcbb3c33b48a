"""Copies of KV between pages of a pool and entries of the disk cache.

A text's KV is stored in whole segments. Layers whose window pages are separate have entries of their own. The pages
behind the last whole segment are the tail, which has an entry that the next text replaces.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import isfinite
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE
from triforce.backends.kv_rows import STORED_TYPES
from triforce.disk_cache.entry import FORMAT, Entry, Part
from triforce.disk_cache.entry_store import Use
from triforce.disk_cache.folder import LOG
from triforce.disk_cache.write_queue import DiskCache
from triforce.errors import CacheError
from triforce.kvcache.eagle_memory import EAGLE_TENSORS, EagleHeadMemory, EagleHeadSlots
from triforce.kvcache.pool import PagePool, PrefixPages
from triforce.kvcache.views.full import TAIL, FullView, LayerKV, write_layers
from triforce.kvcache.views.streaming import StreamingView
from triforce.ragged import Ints, common_prefix

IDS = "ids"
"""Name of the token ids in an entry."""


LAYERS = ("keys", "values")
"""Names of K and V of layers without window pages."""
WINDOWS = ("window_keys", "window_values")
"""Names of K and V of layers with window pages."""


def parts_of(layers: Sequence[LayerKV], names: tuple[str, str] = LAYERS) -> dict[str, Part]:
    """Return parts of an entry with a copy of K and V of each layer, (G, N, D) each; no parts for no layers."""
    return {name: part_of([layer[i] for layer in layers]) for i, name in enumerate(names) if layers}


def part_of(layers: Sequence[Tensor]) -> Part:
    """Return one part of an entry with a copy of the tensors (G, N, D) of all layers."""
    stacked_LGND = torch.empty(len(layers), *layers[0].shape, dtype=layers[0].dtype)
    for layer, tensor in enumerate(layers):
        stacked_LGND[layer].copy_(tensor)
    return Part(
        STORED_TYPES[stacked_LGND.dtype], stacked_LGND.shape, stacked_LGND.flatten().view(torch.uint8).numpy().data
    )


def layers_of(
    entry: Entry, shape: Sequence[int], dtype: torch.dtype, names: tuple[str, str] = LAYERS
) -> list[LayerKV] | None:
    """Return K and V of each layer of an entry, (G, N, D); None unless both have this shape (LGND) and dtype."""
    if not shape[0]:
        return []
    keys, values = (_tensor(entry, name, shape, dtype) for name in names)
    return None if keys is None or values is None else list(zip(keys, values, strict=True))


def ids_part(ids: Ints) -> Part:
    """Return a part of an entry with a copy of token ids."""
    return Part("I64", ids.shape, memoryview(bytearray(ids.tobytes())))


def ids_of(entry: Entry) -> Ints | None:
    """Return the token ids of a tail's entry; None where it has none."""
    part = entry.parts.get(IDS)
    if part is None or part.kind != "I64" or len(part.shape) != 1:
        return None
    return np.frombuffer(part.data, dtype=np.int64)


def seconds_of(entry: Entry) -> float:
    """Return the prefill seconds per token that an entry records; 0 where it records none."""
    try:
        seconds = float(entry.facts["seconds_per_token"])
    except (KeyError, ValueError):
        return 0.0
    return seconds if isfinite(seconds) else 0.0


def eagle_slots_of(entry: Entry, memory: EagleHeadMemory, tokens: int) -> EagleHeadSlots | None:
    """Return an EAGLE head's slots of an entry of `tokens` tokens; None unless they have the memory's shape and dtype.

    memory: the memory of the EAGLE head that will take them.
    """
    shapes = zip(EAGLE_TENSORS, memory.shapes(tokens), strict=True)
    keys, values, states = (_tensor(entry, name, (1, *shape), memory.dtype) for name, shape in shapes)
    if keys is None or values is None or states is None:
        return None
    return EagleHeadSlots(keys[0], values[0], states[0])


def _tensor(entry: Entry, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    part = entry.parts.get(name)
    if part is None or (list(part.shape), part.kind) != (list(shape), STORED_TYPES.get(dtype)):
        return None
    return torch.frombuffer(part.data, dtype=dtype).view(*shape)


SEGMENT = 256
"""Tokens of a segment."""
MAX_PENDING = 4096
"""Pending segments at most, a million tokens."""
STEPS = 15
"""Decoding goes on for `STEPS` times the seconds of a copy before the next copy."""
ID_BYTES = 4
"""Bytes of a token id in an entry of the latest texts."""

Pages = Callable[[int, int], PrefixPages | None]
"""Function that returns the pages of tokens [start, stop) of a text, both multiples of `PAGE`; None: evicted."""


class KVProfile(NamedTuple):
    """Identity of the models and kernels that compute KV. KV of others may differ in bits."""

    model: str
    """The target's name for people. It is shown, and part of no entry's name."""
    target: str
    """The target's fingerprint of weights, rotation and dtype, and the fingerprint of an EAGLE head."""
    draft: str
    """The draft's fingerprint and the bits of its weights; empty without a draft."""
    kernels: str
    """Kernels, their level, and their build."""


@dataclass(slots=True)
class PendingSegment:
    """A segment to be written once there is room in the queue.

    previous_name: name of the segment before it. cost: prefill seconds per token. layers: its KV, if it lies in no
    pages. ids: token ids of a tail, which replaces an earlier tail of the same name. windows: whether it is the KV of
    layers with window pages, not of the other layers.
    """

    name: str
    previous_name: str
    index: int
    use: Use
    cost: float
    pages: Pages | None = None
    layers: list[LayerKV] | None = None
    ids: Ints | None = None
    windows: bool = False

    @property
    def tokens(self) -> int:
        """Count of its tokens."""
        return SEGMENT if self.ids is None else len(self.ids)


class DiskPrefixes:
    """Names and entries of a pool's KV. The engine's thread calls it; another thread writes files.

    granularity: shared prefixes are multiples of this count of tokens.
    """

    def __init__(self, cache: DiskCache, profile: KVProfile, pool: PagePool, granularity: int) -> None:
        self._cache = cache
        self.store = cache.store
        self._queue = cache.queue
        self.pool = pool
        self.granularity = max(granularity, SEGMENT)
        self._profile = profile
        self._pending: deque[PendingSegment] = deque()
        self._pause_until = 0.0
        self._failures = self._queue.failures
        self.losses = 0
        """Count of times that segments were dropped. Later segments of texts that began before cannot be found."""

    def root(self, scope: str) -> str:
        """Return the name that stands before the first segment of a text."""
        shapes = [SEGMENT, PAGE, self.granularity, *self.pool.min_pass_shape, *self.pool.layers(windows=True)]
        facts = [FORMAT, shapes, self._profile.target, self._profile.kernels, str(self.pool.dtype)]
        return self.store.name(b"root", json.dumps(facts).encode(), scope.encode())

    def draft_name(self, name: str, view: StreamingView) -> str:
        """Return the name of the draft's visible KV at the end of the segment `name`."""
        facts = [self._profile.draft, view.sinks, view.window, view.unit, str(view.dtype)]
        return self.store.name(b"draft", json.dumps(facts).encode(), name.encode())

    def windows_name(self, name: str) -> str:
        """Return the name of the window layers' KV of the segment `name`."""
        return self.store.name(b"windows", name.encode())

    def tail_name(self, name: str) -> str:
        """Return the name of the tail behind the segment `name`, that of the latest text."""
        return self.store.name(b"rest", name.encode())

    def enqueue(self, segment: PendingSegment) -> None:
        """Append a segment to the pending ones; drop it where `MAX_PENDING` are pending, as the disk is slow."""
        if len(self._pending) < MAX_PENDING:
            self._pending.append(segment)
        else:
            self.losses += 1

    def latest(self, scope: str) -> list[Ints]:
        """Return token ids of the latest texts of a scope, the oldest first, as any process has written them."""
        entry = self.store.read(self._latest_name(scope))
        texts = [part.data for part in entry.parts.values() if len(part.data) % ID_BYTES == 0] if entry else []
        return [np.frombuffer(data, dtype=np.int32).astype(np.int64) for data in texts]

    def keep_latest(self, scope: str, texts: Sequence[Ints]) -> None:
        """Queue a write of the token ids of a scope's latest texts, in place of the earlier ones, if there is room."""
        parts = {}
        for number, text in enumerate(texts):
            data = memoryview(bytearray(text.astype(np.int32).tobytes()))
            parts[str(number)] = Part("U8", [len(data)], data)
        entry = Entry({"kind": "latest", "model": self._profile.model}, parts)
        write = partial(self.store.write, self._latest_name(scope), entry, Use(), 0, replace=True)
        self._queue.offer(write, entry.bytes)

    def _latest_name(self, scope: str) -> str:
        return self.store.name(b"latest", self.root(scope).encode())

    def write_next(self) -> bool:
        """Copy the first pending segment to the queue, if there is room.

        Returns whether there was room and more segments are pending.
        """
        if self._failures != self._queue.failures:
            self._failures = self._queue.failures
            self.drop_pending()
        while self._pending:
            segment = self._pending[0]
            if segment.ids is None and self.store.folder.has(segment.name):
                size = 1
                write = partial(self.store.touch, segment.name, segment.use, segment.index)
            else:
                size = self._bytes(segment)
                if not self._queue.has_room(size):
                    return False
                if (parts := self._parts(segment)) is None:
                    self._pending.popleft()  # its pages are evicted, and so are those of later segments
                    continue
                entry = self._entry(segment, parts)
                replace = segment.ids is not None
                write = partial(self.store.write, segment.name, entry, segment.use, segment.index, replace=replace)
            if not self._queue.offer(write, size):
                return False
            self._pending.popleft()
            if size > 1:
                return bool(self._pending)
        return False

    def write_between_steps(self) -> None:
        """Copy one segment between two steps, unless copies would take more than 1 / `STEPS` of the time of steps."""
        if self._pending and (began := perf_counter()) >= self._pause_until:
            self.write_next()
            self._pause_until = perf_counter() + STEPS * (perf_counter() - began)

    def write_all(self, stop: Callable[[], object]) -> None:
        """Copy all pending segments to the queue as it gets room, until `stop` returns true or the queue is closed."""
        while self._pending and not stop():
            if not self.write_next() and self._pending and not self._queue.wait():
                return

    def drop_pending(self) -> None:
        """Drop all pending segments: their pages are unreliable, or segments before them are lost."""
        self.losses += 1
        self._pending.clear()

    def _bytes(self, segment: PendingSegment) -> int:
        if segment.layers:
            return sum(t.numel() * t.itemsize for layer in segment.layers for t in layer)
        kv_bytes = segment.tokens * self.pool.token_bytes * len(self._layers(segment)) // self.pool.config.layers
        eagle_memory = None if segment.windows else self.pool.eagle_memory
        return kv_bytes + (segment.tokens * eagle_memory.token_bytes if eagle_memory else 0)

    def _layers(self, segment: PendingSegment) -> list[int]:
        """Return the layers whose KV the segment's entry holds."""
        window_layers = self.pool.layers(windows=True)
        full_layers = [] if segment.windows else self.pool.layers(windows=False)
        return window_layers + full_layers if segment.windows or segment.ids is not None else full_layers

    def _parts(self, segment: PendingSegment) -> dict[str, Part] | None:
        """Return the parts of the segment's entry; None where pages are evicted or cannot be read."""
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
        except (
            CacheError,
            MemoryError,
            RuntimeError,
        ) as error:  # offloaded pages cannot be read, or memory is too small for a copy
            LOG.warning("disk cache: a segment is not kept: %s", error)
            return None
        if segment.ids is not None:
            parts[IDS] = ids_part(segment.ids)
        return parts

    def _parts_without_window(self, pages: Sequence[int]) -> dict[str, Part]:
        eagle_memory = self.pool.eagle_memory
        eagle_tensors = zip(EAGLE_TENSORS, eagle_memory.read(self._slots(pages)), strict=True) if eagle_memory else ()
        layers = self._read(self.pool.layers(windows=False), pages)
        return parts_of(layers) | {name: part_of([tensor]) for name, tensor in eagle_tensors}

    def _read(self, layers: Sequence[int], pages: Sequence[int]) -> list[LayerKV]:
        slots_N = self._slots(pages)
        return [self.pool.kv.read(layer, slots_N) for layer in layers]

    def _slots(self, pages: Sequence[int]) -> Tensor:
        pages_P = torch.tensor(pages, dtype=torch.long, device=self.pool.device)
        return (pages_P[:, None] * PAGE + torch.arange(PAGE, device=self.pool.device)).flatten()

    def _entry(self, segment: PendingSegment, parts: dict[str, Part]) -> Entry:
        kind = "draft" if segment.layers else "windows" if segment.windows else "kv"
        facts = {
            "kind": kind if segment.ids is None else "rest",
            "model": self._profile.model,
            "profile": self._profile.kernels,
            "after": segment.previous_name,
            "segment": str(segment.index),
            "tokens": str(segment.tokens),
            "seconds_per_token": f"{segment.cost:.3g}",
        }
        return Entry(facts, parts)


class DiskWindows:
    """Windows of one text on disk; none where no layer has window pages. use: use of the store by its request."""

    def __init__(self, disk: DiskPrefixes, use: Use) -> None:
        self._disk = disk
        self._use = use
        self._windows = disk.pool.windows
        self._added = 0

    def reach(self, names: Sequence[str]) -> int:
        """Return how many of these segments, from the first on, can be restored together with their windows.

        names: of the text's segments. Without window pages all of them count.
        """
        if self._windows is None:
            return len(names)
        has = self._disk.store.folder.has
        step = self._disk.granularity // SEGMENT
        present_segments = sum(1 for _ in takewhile(has, names)) // step * step
        for stop in range(present_segments, 0, -step):
            first_segment = self._windows.first_needed_page(stop * SEGMENT) * PAGE // SEGMENT
            if all(has(self._disk.windows_name(name)) for name in names[first_segment:stop]):
                return stop
        return 0

    def restore(
        self, full: FullView, b: int, names: Sequence[str], stop: int, tail_layers: list[LayerKV] | None = None
    ) -> bool:
        """Restore the windows before token `stop` into row b, whose other layers hold `stop` tokens.

        names: of the row's segments. tail_layers: KV of the window layers in the tail. Returns False, and changes
        nothing, where windows are missing.
        """
        windows = full.pool.windows
        pool = full.pool
        row = full.rows[b]
        if windows is None or stop <= full.lengths_B[b]:
            return False
        first_token = windows.first_needed_page(stop) * PAGE
        segments = list[tuple[int, list[LayerKV]]]()
        for start in range(first_token // SEGMENT * SEGMENT, stop, SEGMENT):
            index = start // SEGMENT
            layers = tail_layers if index == len(names) else self._segment(names[index], index)
            if layers is None:
                return False
            segments.append((start, layers))
        windows.clear(row)
        windows.allocate_row(row, first_token, stop)
        for start, layers in segments:
            tokens = slice(max(start, first_token), min(start + SEGMENT, stop))
            slots_N = windows.slots(row, tokens.start, tokens.stop)
            segment_tokens = slice(tokens.start - start, tokens.stop - start)
            write_layers(pool.kv, slots_N, zip(pool.layers(windows=True), layers, strict=True), segment_tokens)
        full.lengths_B[b] = stop
        return True

    def keep(self, names: Sequence[str], tokens: int, cost: float, pages: Pages) -> None:
        """Enqueue the window pages that are left of a text of `tokens` tokens. names: of its segments."""
        if self._windows is None:
            return
        first_segment = -(-self._windows.first_kept_page(tokens) * PAGE // SEGMENT)
        for index in range(max(first_segment, self._added), len(names)):
            name = self._disk.windows_name(names[index])
            self._disk.enqueue(PendingSegment(name, names[index], index, self._use, cost, pages, windows=True))
        self._added = max(self._added, len(names))

    def layers(self, entry: Entry, tokens: int) -> list[LayerKV] | None:
        """Return K and V (G, N, D) of the window layers of an entry of `tokens` tokens; None for other shapes."""
        pool = self._disk.pool
        shape = [len(pool.layers(windows=True)), pool.config.kv_heads, tokens, pool.config.row_size]
        return layers_of(entry, shape, pool.dtype, WINDOWS)

    def _segment(self, name: str, index: int) -> list[LayerKV] | None:
        windows_name = self._disk.windows_name(name)
        if (entry := self._disk.store.read(windows_name)) is None:
            return None
        self._disk.enqueue(PendingSegment(windows_name, name, index, self._use, 0.0, windows=True))
        return self.layers(entry, SEGMENT)


MIN_TEXT_TOKENS = 512
"""Least tokens of a text that is kept. The prefill of a shorter text takes no noticeable time."""
BATCH_SEGMENTS = 16
"""Segments of a prompt that are enqueued together during its prefill; the others once it is read or given up."""
GRACE = 0.25
"""Seconds of waiting for the disk that are always allowed, as they are hardly noticeable."""

Tokens = Sequence[int] | Ints


class DiskText:
    """The segments of one text on disk. use: use of the store by its request, whose texts share it."""

    def __init__(self, disk: DiskPrefixes, scope: str, use: Use, prompt_tokens: int) -> None:
        self._disk = disk
        self._use = use
        self._prompt_tokens = prompt_tokens
        self._names = list[str]()
        self._root = disk.root(scope)
        self._windows = DiskWindows(disk, use)
        self._added = 0
        self._losses = disk.losses
        self._drafts: list[PendingSegment] = []
        self.cost = 0.0
        """Prefill seconds per token of its prompt."""
        self.given_up = False
        """Whether reading stopped before the stored segments ended, as a prefill is faster."""

    def restore(self, full: FullView, b: int, prompt: Tokens) -> Iterator[int]:
        """Restore stored segments of a prompt into row b, one by one. Yields the row's length after each.

        The prompt's last `TAIL` tokens are left to be fed, as selections need their queries. It stops early where the
        wait for the disk exceeds the prefill seconds that the segments record. Copies do not count: a prefill writes
        that memory too.
        """
        disk = self._disk
        max_tokens = max(len(prompt) - 1 - TAIL, 0)
        index = int(full.lengths_B[b]) // SEGMENT
        names = self._named(prompt[: max_tokens // disk.granularity * disk.granularity])
        waited_seconds = 0.0
        prefill_seconds = GRACE
        names = names[: self._windows.reach(names)]
        entries = disk.store.read_ahead(names[index:])
        while not self.given_up:
            began = perf_counter()
            entry = next(entries, None)
            stop = (index + 1) * SEGMENT
            waited_seconds += perf_counter() - began
            if entry is None or not _copy(entry, SEGMENT, full, b, (index * SEGMENT, stop)):
                break
            if stop % disk.granularity == 0 and not disk.pool.windows:
                full.lengths_B[b] = stop
            self._record_use(index, names[index])
            index = index + 1
            prefill_seconds = prefill_seconds + SEGMENT * seconds_of(entry)
            self.given_up = waited_seconds > prefill_seconds
            yield int(full.lengths_B[b])
        tail_restored = (
            not self.given_up
            and disk.granularity == SEGMENT
            and self._restore_tail(full, b, prompt[:max_tokens], index)
        )
        restored_tokens = index * SEGMENT // disk.granularity * disk.granularity
        if tail_restored or self._windows.restore(full, b, names, restored_tokens):
            yield int(full.lengths_B[b])

    def _restore_tail(self, full: FullView, b: int, prompt: Tokens, index: int) -> bool:
        """Restore the pages that a prompt shares with the latest tail behind its first `index` segments.

        Returns whether there are such pages.
        """
        start = index * SEGMENT
        entry = self._disk.store.read(self._disk.tail_name(self._name_before(prompt, index)))
        if entry is None or (ids := ids_of(entry)) is None:
            return False
        stop = start + common_prefix(ids.tolist(), list(prompt[start : start + SEGMENT])) // PAGE * PAGE
        if stop <= max(start, full.lengths_B[b]) or not _copy(entry, len(ids), full, b, (start, stop)):
            return False
        if self._disk.pool.windows:
            return self._windows.restore(full, b, self._names[:index], stop, self._windows.layers(entry, len(ids)))
        full.lengths_B[b] = stop
        return True

    def restore_draft(self, view: StreamingView, b: int, prompt: Tokens) -> None:
        """Start empty row b of the draft's view at the end of the last stored segment.

        Segments that end too early to shorten the draft's prefill are not read.
        """
        names = self._named(prompt[:-1])
        unused_segments = max(len(prompt) - 1 - view.config.layers * view.window, 0) // SEGMENT
        shape = [view.config.layers, view.config.kv_heads, view.sinks + view.window, view.config.row_size]
        for index in reversed(range(unused_segments, len(names))):
            name = self._disk.draft_name(names[index], view)
            if not self._disk.store.folder.has(name):
                continue
            entry = self._disk.store.read(name)
            stop = (index + 1) * SEGMENT
            shape[2] = view.visible(stop)
            if entry and (layers := layers_of(entry, shape, view.dtype)):
                view.start_at(b, stop, layers)
                self._drafts.append(PendingSegment(name, names[index], index, self._use, 0.0))
            return

    def draft_stop(self, prompt: Tokens) -> int:
        """Return the length of a prompt at which the draft's view is to be kept; 0: never."""
        return (len(prompt) - 1) // SEGMENT * SEGMENT if len(prompt) > MIN_TEXT_TOKENS else 0

    def keep_draft(self, view: StreamingView, b: int, prompt: Tokens) -> None:
        """Copy the draft's visible KV of row b, whose length is the end of a segment of the prompt, for `keep`."""
        index = int(view.lengths_B[b]) // SEGMENT - 1
        previous_name = self._named(prompt)[index]
        name = self._disk.draft_name(previous_name, view)
        self._drafts.append(PendingSegment(name, previous_name, index, self._use, 0.0, layers=view.window_of(b)))

    def has_unsaved(self, tokens: int) -> bool:
        """Whether a text of `tokens` tokens has `BATCH_SEGMENTS` segments or more that are not enqueued yet."""
        return tokens >= (self._added + BATCH_SEGMENTS) * SEGMENT

    def keep(self, text: Tokens, pages: Pages, midway: bool = False) -> None:
        """Enqueue the segments of a text. pages: returns the pages of its KV, all of it committed.

        midway: the prefill of its prompt goes on, so windows are of no use yet.
        """
        if len(text) < MIN_TEXT_TOKENS or self._losses != self._disk.losses:
            return
        names = self._named(text)
        for index in range(self._added, len(names)):
            previous_name = self._name_before(text, index)
            self._disk.enqueue(PendingSegment(names[index], previous_name, index, self._use, self.cost, pages))
        self._added = max(self._added, len(names))
        if not midway:
            self._windows.keep(names, len(text), self.cost, pages)
        if len(text) >= (self._prompt_tokens - 1) // PAGE * PAGE:
            self._keep_tail(text, pages)
        for draft in self._drafts:
            self._disk.enqueue(draft)
        self._drafts.clear()

    def _keep_tail(self, text: Tokens, pages: Pages) -> None:
        """Enqueue the tail of a text, which another text may share in part."""
        index = len(text) // SEGMENT
        if len(ids := np.asarray(text[index * SEGMENT : len(text) // PAGE * PAGE], dtype=np.int64)):
            previous_name = self._name_before(text, index)
            name = self._disk.tail_name(previous_name)
            self._disk.enqueue(PendingSegment(name, previous_name, index, self._use, self.cost, pages, ids=ids))

    def _name_before(self, text: Tokens, index: int) -> str:
        """Return the name of the segment before segment `index`."""
        return self._named(text)[index - 1] if index else self._root

    def _record_use(self, index: int, name: str) -> None:
        """Enqueue a use of a restored segment, if all segments before it are restored or enqueued too."""
        if index == self._added:
            self._disk.enqueue(PendingSegment(name, "", index, self._use, 0.0))
            self._added += 1

    def _named(self, text: Tokens) -> list[str]:
        """Return the names of a text's whole segments. A text only grows."""
        ids = np.asarray(text[len(self._names) * SEGMENT :], dtype=np.int64)
        for start in range(0, len(ids) - SEGMENT + 1, SEGMENT):
            previous_name = self._names[-1] if self._names else self._root
            self._names.append(
                self._disk.store.name(b"kv", previous_name.encode(), ids[start : start + SEGMENT].tobytes())
            )
        return self._names[: len(text) // SEGMENT]


def _copy(entry: Entry, tokens: int, full: FullView, b: int, place: tuple[int, int]) -> bool:
    """Copy an entry of `tokens` tokens to tokens `place` of row b, without the tokens that the row has already.

    place: start and stop. An entry may be longer than that. Returns False where its shapes do not fit.
    """
    pool = full.pool
    row = full.rows[b]
    (start, stop) = place
    entry_tokens = slice(max(int(full.lengths_B[b]) - start, 0), stop - start)
    slots_N = pool.slots(row, start + entry_tokens.start, stop)
    full_layers = pool.layers(windows=False)
    layers = layers_of(entry, [len(full_layers), pool.config.kv_heads, tokens, pool.config.row_size], pool.dtype)
    eagle_slots = eagle_slots_of(entry, pool.eagle_memory, tokens) if pool.eagle_memory else None
    if layers is None or (pool.eagle_memory and eagle_slots is None):
        return False
    if pool.eagle_memory and eagle_slots:
        pool.eagle_memory.write(slots_N, eagle_slots.part(entry_tokens))
    write_layers(pool.kv, slots_N, zip(full_layers, layers, strict=True), entry_tokens)
    return True
