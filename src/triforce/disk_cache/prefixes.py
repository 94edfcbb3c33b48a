"""Copies of KV between pages of a pool and entries of the disk cache.

A text's KV is stored in whole segments. KV of layers with window pages is stored in separate entries. The pages after
the last whole segment are the tail. The entry of a tail is replaced by the tail of the next text with the same
segments.
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, Array, DType, dtype_name, to_host
from triforce.backends.kernel_api import PAGE
from triforce.disk_cache.entry import FORMAT, Entry, Part
from triforce.disk_cache.entry_store import Use
from triforce.disk_cache.folder import LOG
from triforce.disk_cache.write_queue import DiskCache
from triforce.errors import CacheError
from triforce.kvcache.eagle_memory import EAGLE_TENSORS, EagleHeadMemory, EagleHeadSlots
from triforce.kvcache.pool import PagePool, PrefixPages, slots_of_pages
from triforce.kvcache.views.full import TAIL, FullView, LayerKV, write_layers
from triforce.model.kv_rows import STORED_TYPES
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


def part_of(layers: Sequence[Array]) -> Part:
    """Return one part of an entry with a copy of the arrays (G, N, D) of all layers."""
    stacked_LGND = np.stack([to_host(array) for array in layers])
    kind = STORED_TYPES[dtype_name(stacked_LGND)]
    return Part(kind, stacked_LGND.shape, stacked_LGND.reshape(-1).view(np.uint8).data)


def layers_of(
    entry: Entry, shape: Sequence[int], dtype: DType, names: tuple[str, str] = LAYERS
) -> list[LayerKV] | None:
    """Return K and V of each layer of an entry, (G, N, D); None unless both have this shape (LGND) and dtype."""
    if not shape[0]:
        return []
    keys, values = (_array(entry, name, shape, dtype) for name in names)
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
    keys, values, states = (_array(entry, name, (1, *shape), memory.dtype) for name, shape in shapes)
    if keys is None or values is None or states is None:
        return None
    return EagleHeadSlots(keys[0], values[0], states[0])


def _array(entry: Entry, name: str, shape: Sequence[int], dtype: DType) -> NDArray[Any] | None:
    part = entry.parts.get(name)
    if part is None or (list(part.shape), part.kind) != (list(shape), STORED_TYPES.get(dtype)):
        return None
    return np.frombuffer(part.data, HOST_TYPES[dtype]).reshape(shape)


SEGMENT = 256
"""Tokens of a segment."""
MAX_PENDING = 4096
"""Pending segments at most, a million tokens."""
DECODING_PER_COPY = 15
"""Decoding goes on for `DECODING_PER_COPY` times the seconds of a copy before the next copy."""
ID_BYTES = 4
"""Bytes of a token id in an entry of the latest texts."""

PageLookup = Callable[[int, int], PrefixPages | None]
"""Returns the pages of tokens [start, stop) of a text, both multiples of `PAGE`; None if they are evicted."""


class KVProfile(NamedTuple):
    """Identity of the models and kernels that compute KV. Others may compute other bits."""

    model: str
    """The target's name for people. It is shown, and part of no entry's name."""
    target: str
    """The target's fingerprint of weights, rotation and dtype, and the fingerprint of an EAGLE head."""
    kernels: str
    """Kernels, their level, and their build."""


@dataclass(slots=True)
class PendingSegment:
    """A segment to be written once there is room in the queue.

    previous_name: name of the segment before it. seconds_per_token: prefill seconds per token. ids: token ids of a
    tail, which replaces an earlier tail of the same name. windows: whether it is the KV of layers with window pages,
    not of the other layers.
    """

    name: str
    previous_name: str
    index: int
    use: Use
    seconds_per_token: float
    pages: PageLookup | None = None
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
        """Count of times that segments were dropped. A text that began before the latest loss stores no more segments,
        because a segment is found only through the segments before it."""

    def root(self, scope: str) -> str:
        """Return the name that stands before the first segment of a text."""
        shapes = [SEGMENT, PAGE, self.granularity, *self.pool.min_pass_shape, *self.pool.layers(windows=True)]
        facts = [FORMAT, shapes, self._profile.target, self._profile.kernels, self.pool.dtype]
        return self.store.name(b"root", json.dumps(facts).encode(), scope.encode())

    def windows_name(self, name: str) -> str:
        """Return the name of the window layers' KV of the segment `name`."""
        return self.store.name(b"windows", name.encode())

    def tail_name(self, name: str) -> str:
        """Return the name of the tail after the segment `name`. It holds the tail of the latest text."""
        return self.store.name(b"rest", name.encode())

    def enqueue(self, segment: PendingSegment) -> None:
        """Append a segment to the pending ones; drop it where `MAX_PENDING` are pending, as the disk is slow."""
        if len(self._pending) < MAX_PENDING:
            self._pending.append(segment)
        else:
            self.losses += 1

    def latest(self, scope: str) -> list[Ints]:
        """Return token ids of the latest texts of a scope, the oldest first, whichever process stored them."""
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
        """Copy one segment between two steps, unless the last copy was too recent (see `DECODING_PER_COPY`)."""
        if self._pending and (began := perf_counter()) >= self._pause_until:
            self.write_next()
            self._pause_until = perf_counter() + DECODING_PER_COPY * (perf_counter() - began)

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
        eagle_parts = zip(EAGLE_TENSORS, eagle_memory.read(self._slots(pages)), strict=True) if eagle_memory else ()
        layers = self._read(self.pool.layers(windows=False), pages)
        return parts_of(layers) | {name: part_of([array]) for name, array in eagle_parts}

    def _read(self, layers: Sequence[int], pages: Sequence[int]) -> list[LayerKV]:
        slots_N = self._slots(pages)
        return [self.pool.kv.read(layer, slots_N) for layer in layers]

    def _slots(self, pages: Sequence[int]) -> Array:
        return self.pool.array(slots_of_pages(pages))

    def _entry(self, segment: PendingSegment, parts: dict[str, Part]) -> Entry:
        kind = "windows" if segment.windows else "kv"
        facts = {
            "kind": kind if segment.ids is None else "rest",
            "model": self._profile.model,
            "profile": self._profile.kernels,
            "after": segment.previous_name,
            "segment": str(segment.index),
            "tokens": str(segment.tokens),
            "seconds_per_token": f"{segment.seconds_per_token:.3g}",
        }
        return Entry(facts, parts)


class DiskWindows:
    """Windows of one text on disk; none where no layer has window pages. use: shared by the texts of one request."""

    def __init__(self, disk: DiskPrefixes, use: Use) -> None:
        self._disk = disk
        self._use = use
        self._windows = disk.pool.windows
        self._enqueued_segments = 0

    def reach(self, names: Sequence[str]) -> int:
        """Return the count of a text's first segments that can be restored together with the windows at their end.

        names: of the text's segments. Without window pages all segments can be restored.
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
            slots_N = pool.array(windows.slots(row, tokens.start, tokens.stop))
            segment_tokens = slice(tokens.start - start, tokens.stop - start)
            write_layers(pool.kv, slots_N, zip(pool.layers(windows=True), layers, strict=True), segment_tokens)
        full.lengths_B[b] = stop
        return True

    def keep(self, names: Sequence[str], tokens: int, seconds_per_token: float, pages: PageLookup) -> None:
        """Enqueue the window pages that are left of a text of `tokens` tokens. names: of its segments."""
        if self._windows is None:
            return
        first_segment = -(-self._windows.first_kept_page(tokens) * PAGE // SEGMENT)
        for index in range(max(first_segment, self._enqueued_segments), len(names)):
            name = self._disk.windows_name(names[index])
            self._disk.enqueue(
                PendingSegment(name, names[index], index, self._use, seconds_per_token, pages, windows=True)
            )
        self._enqueued_segments = max(self._enqueued_segments, len(names))

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
"""Segments of a prompt that are enqueued together during its prefill. The rest is enqueued when the prefill ends."""
GRACE = 0.25
"""Seconds of waiting for the disk that are always allowed, as they are hardly noticeable."""

Tokens = Sequence[int] | Ints


class DiskText:
    """The segments of one text on disk. use: shared by the texts of one request."""

    def __init__(self, disk: DiskPrefixes, scope: str, use: Use, prompt_tokens: int) -> None:
        self._disk = disk
        self._use = use
        self._prompt_tokens = prompt_tokens
        self._names = list[str]()
        self._root = disk.root(scope)
        self._windows = DiskWindows(disk, use)
        self._enqueued_segments = 0
        self._losses = disk.losses
        self.seconds_per_token = 0.0
        """Prefill seconds per token of its prompt."""
        self.given_up = False
        """Whether reading stopped before the stored segments ended, as a prefill is faster."""

    def restore(self, full: FullView, b: int, prompt: Tokens) -> Iterator[int]:
        """Restore stored segments of a prompt into row b, one by one. Yields the row's length after each.

        The prompt's last `TAIL` tokens are left to be fed, as selections need their queries. Restoring stops early if
        the wait for the disk exceeds the recorded prefill seconds of the segments by more than `GRACE`. Copies do not
        count, because a prefill writes the same memory.
        """
        disk = self._disk
        max_tokens = max(len(prompt) - 1 - TAIL, 0)
        index = int(full.lengths_B[b]) // SEGMENT
        names = self._segment_names(prompt[: max_tokens // disk.granularity * disk.granularity])
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
        """Restore the pages that a prompt shares with the latest tail after its first `index` segments.

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

    def has_unsaved(self, tokens: int) -> bool:
        """Whether a text of `tokens` tokens has `BATCH_SEGMENTS` segments or more that are not enqueued yet."""
        return tokens >= (self._enqueued_segments + BATCH_SEGMENTS) * SEGMENT

    def keep(self, text: Tokens, pages: PageLookup, midway: bool = False) -> None:
        """Enqueue the segments of a text. pages: returns the pages of its KV, all of it committed.

        midway: the prefill of its prompt goes on, so windows are of no use yet.
        """
        if len(text) < MIN_TEXT_TOKENS or self._losses != self._disk.losses:
            return
        names = self._segment_names(text)
        for index in range(self._enqueued_segments, len(names)):
            previous_name = self._name_before(text, index)
            segment = PendingSegment(names[index], previous_name, index, self._use, self.seconds_per_token, pages)
            self._disk.enqueue(segment)
        self._enqueued_segments = max(self._enqueued_segments, len(names))
        if not midway:
            self._windows.keep(names, len(text), self.seconds_per_token, pages)
        if len(text) >= (self._prompt_tokens - 1) // PAGE * PAGE:
            self._keep_tail(text, pages)

    def _keep_tail(self, text: Tokens, pages: PageLookup) -> None:
        """Enqueue the tail of a text, which another text may share in part."""
        index = len(text) // SEGMENT
        if len(ids := np.asarray(text[index * SEGMENT : len(text) // PAGE * PAGE], dtype=np.int64)):
            previous_name = self._name_before(text, index)
            name = self._disk.tail_name(previous_name)
            self._disk.enqueue(
                PendingSegment(name, previous_name, index, self._use, self.seconds_per_token, pages, ids=ids)
            )

    def _name_before(self, text: Tokens, index: int) -> str:
        """Return the name of the segment before segment `index`."""
        return self._segment_names(text)[index - 1] if index else self._root

    def _record_use(self, index: int, name: str) -> None:
        """Enqueue a use of a restored segment, if all segments before it are restored or enqueued too."""
        if index == self._enqueued_segments:
            self._disk.enqueue(PendingSegment(name, "", index, self._use, 0.0))
            self._enqueued_segments += 1

    def _segment_names(self, text: Tokens) -> list[str]:
        """Return the names of a text's whole segments. A text only grows."""
        ids = np.asarray(text[len(self._names) * SEGMENT :], dtype=np.int64)
        for start in range(0, len(ids) - SEGMENT + 1, SEGMENT):
            previous_name = self._names[-1] if self._names else self._root
            self._names.append(
                self._disk.store.name(b"kv", previous_name.encode(), ids[start : start + SEGMENT].tobytes())
            )
        return self._names[: len(text) // SEGMENT]


def _copy(entry: Entry, tokens: int, full: FullView, b: int, token_span: tuple[int, int]) -> bool:
    """Copy an entry of `tokens` tokens to row b, without the tokens that the row has already.

    token_span: start and stop in the row; an entry may be longer than this span. Returns False where its shapes do not
    fit.
    """
    pool = full.pool
    row = full.rows[b]
    (start, stop) = token_span
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
