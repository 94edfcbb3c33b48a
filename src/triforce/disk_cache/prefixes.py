"""KV of texts on its way between pages and entries of the disk cache: whole segments, and windows apart."""

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
"""The name of token ids in an entry."""


LAYERS, WINDOWS = ("keys", "values"), ("window_keys", "window_values")
"""Names of K and V of layers, and of those whose pages are apart, as they have a window."""


def parts_of(layers: Sequence[LayerKV], names: tuple[str, str] = LAYERS) -> dict[str, Part]:
    """Copy K and V of some layers, (G, N, D) each, to parts of an entry; of none there are no parts."""
    return {name: part_of([layer[i] for layer in layers]) for i, name in enumerate(names) if layers}


def part_of(layers: Sequence[Tensor]) -> Part:
    """Copy tensors (G, N, D) of all layers to one part of an entry."""
    whole_LGND = torch.empty(len(layers), *layers[0].shape, dtype=layers[0].dtype)
    for layer, each in enumerate(layers):
        whole_LGND[layer].copy_(each)
    return Part(STORED_TYPES[whole_LGND.dtype], whole_LGND.shape, whole_LGND.flatten().view(torch.uint8).numpy().data)


def layers_of(
    entry: Entry, shape: Sequence[int], dtype: torch.dtype, names: tuple[str, str] = LAYERS
) -> list[LayerKV] | None:
    """Return K and V of each layer of an entry, (G, N, D); None unless all of it has this shape (LGND) and dtype."""
    if not shape[0]:
        return []
    keys, values = (_tensor(entry, name, shape, dtype) for name in names)
    return None if keys is None or values is None else list(zip(keys, values, strict=True))


def ids_part(ids: Ints) -> Part:
    """Copy token ids to a part of an entry."""
    return Part("I64", ids.shape, memoryview(bytearray(ids.tobytes())))


def ids_of(entry: Entry) -> Ints | None:
    """Return the token ids that an entry of whole pages holds; None unless there are some."""
    part = entry.parts.get(IDS)
    if part is None or part.kind != "I64" or len(part.shape) != 1:
        return None
    return np.frombuffer(part.data, dtype=np.int64)


def seconds_of(entry: Entry) -> float:
    """Return the seconds that a prefill took for a token of an entry; 0 where it does not say so."""
    try:
        seconds = float(entry.facts["seconds_per_token"])
    except (KeyError, ValueError):
        return 0.0
    return seconds if isfinite(seconds) else 0.0


def eagle_slots_of(entry: Entry, features: EagleHeadMemory, tokens: int) -> EagleHeadSlots | None:
    """Return what an EAGLE head held of so many tokens of an entry; None unless it has their shape and dtype."""
    shapes = zip(EAGLE_TENSORS, features.shapes(tokens), strict=True)
    keys, values, states = (_tensor(entry, name, (1, *shape), features.dtype) for name, shape in shapes)
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
        self._cache = cache
        self.store = cache.store
        self._queue = cache.queue
        self.pool = pool
        self.whole = max(whole, SEGMENT)
        self._profile = profile
        self._waiting: deque[WaitingSegment] = deque()
        self._pause_until = 0.0
        self._failures = self._queue.failures
        self.losses = 0
        """Times that segments were given up: of texts that began before, what follows would be found by nobody."""

    def root(self, scope: str) -> str:
        """Return the name that the first segment of a text follows."""
        shapes = [SEGMENT, PAGE, self.whole, *self.pool.min_pass_shape, *self.pool.layers(windows=True)]
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
                size = 1
                write = partial(self.store.touch, first.name, first.use, first.index)
            else:
                size = self._bytes(first)
                if not self._queue.has_room(size):
                    return False
                if (parts := self._parts(first)) is None:
                    self._waiting.popleft()  # its pages were needed, and so are those of what follows
                    continue
                entry = self._entry(first, parts)
                replace = first.ids is not None
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
        features = None if segment.windows else self.pool.eagle_memory
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
        features = self.pool.eagle_memory
        held = zip(EAGLE_TENSORS, features.read(self._slots(pages)), strict=True) if features else ()
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


class DiskWindows:
    """Windows of one text, whose request is `use`; there are none where all layers have the same pages."""

    def __init__(self, disk: DiskPrefixes, use: Use) -> None:
        self._disk = disk
        self._use = use
        self._windows = disk.pool.windows
        self._added = 0

    def reach(self, names: Sequence[str]) -> int:
        """Count the first of these segments that are there, and before whose end the windows are; or all of them."""
        if self._windows is None:
            return len(names)
        has = self._disk.store.folder.has
        step = self._disk.whole // SEGMENT
        known = sum(1 for _ in takewhile(has, names)) // step * step
        for stop in range(known, 0, -step):
            first = self._windows.first_needed_page(stop * SEGMENT) * PAGE // SEGMENT
            if all(has(self._disk.windows_name(name)) for name in names[first:stop]):
                return stop
        return 0

    def restore(
        self, full: FullView, b: int, names: Sequence[str], stop: int, rest: list[LayerKV] | None = None
    ) -> bool:
        """Let row b of an exact view, whose other layers hold so many tokens, see them, if the windows are found.

        names: of its segments. rest: what these layers have behind them.
        """
        windows = full.pool.windows
        pool = full.pool
        row = full.rows[b]
        if windows is None or stop <= full.lengths_B[b]:
            return False
        first = windows.first_needed_page(stop) * PAGE
        found = list[tuple[int, list[LayerKV]]]()
        for start in range(first // SEGMENT * SEGMENT, stop, SEGMENT):
            index = start // SEGMENT
            layers = rest if index == len(names) else self._segment(names[index], index)
            if layers is None:
                return False
            found.append((start, layers))
        windows.clear(row)
        windows.allocate_row(row, first, stop)
        for start, layers in found:
            here = slice(max(start, first), min(start + SEGMENT, stop))
            slots_N = windows.slots(row, here.start, here.stop)
            some = slice(here.start - start, here.stop - start)
            write_layers(pool.kv, slots_N, zip(pool.layers(windows=True), layers, strict=True), some)
        full.lengths_B[b] = stop
        return True

    def keep(self, names: Sequence[str], tokens: int, cost: float, pages: Pages) -> None:
        """Have what is still there of a text of so many tokens written behind the answer; names: of its segments."""
        if self._windows is None:
            return
        first = -(-self._windows.first_kept_page(tokens) * PAGE // SEGMENT)
        for index in range(max(first, self._added), len(names)):
            name = self._disk.windows_name(names[index])
            self._disk.add(WaitingSegment(name, names[index], index, self._use, cost, pages, windows=True))
        self._added = max(self._added, len(names))

    def layers(self, entry: Entry, tokens: int) -> list[LayerKV] | None:
        """Return K and V of the layers of an entry of so many tokens, (G, N, D); None unless it holds such."""
        pool = self._disk.pool
        shape = [len(pool.layers(windows=True)), pool.config.kv_heads, tokens, pool.config.row_size]
        return layers_of(entry, shape, pool.dtype, WINDOWS)

    def _segment(self, name: str, index: int) -> list[LayerKV] | None:
        windows_name = self._disk.windows_name(name)
        if (entry := self._disk.store.read(windows_name)) is None:
            return None
        self._disk.add(WaitingSegment(windows_name, name, index, self._use, 0.0, windows=True))
        return self.layers(entry, SEGMENT)


LEAST = 512
"""Tokens of a text that is kept, at least. A shorter one is read in no time."""
MANY = 16
"""Segments of a prompt that are kept together while it is read; the rest once it is read or given up."""
GRACE = 0.25
"""Seconds of waiting for the disk that are not compared with anything: nobody would notice the difference."""

Tokens = Sequence[int] | Ints


class DiskText:
    """The segments of one text, whose prompt has so many tokens. use: that of its request, whose texts share it."""

    def __init__(self, disk: DiskPrefixes, scope: str, use: Use, prompt_tokens: int) -> None:
        self._disk = disk
        self._use = use
        self._prompt_tokens = prompt_tokens
        self._names = list[str]()
        self._root = disk.root(scope)
        self._windows = DiskWindows(disk, use)
        self._added = 0
        self._losses = disk.losses
        self._drafts: list[WaitingSegment] = []
        self.cost = 0.0
        """Seconds that the prefill of its prompt took for a token."""
        self.given_up = False
        """Whether reading ended before what is kept did, as a prefill is faster."""

    def restore(self, full: FullView, b: int, prompt: Tokens) -> Iterator[int]:
        """Let row b of an exact view see more of a prompt, as far as segments of it are found. Yields how much.

        Its last tokens are left to be fed, as a selection goes by them. It ends early where the disk is waited for
        longer than a prefill took when the segments were made. Copies do not count: a prefill writes that memory, too.
        """
        disk = self._disk
        most = max(len(prompt) - 1 - TAIL, 0)
        index = int(full.lengths_B[b]) // SEGMENT
        names = self._named(prompt[: most // disk.whole * disk.whole])
        waited = 0.0
        worth = GRACE
        names = names[: self._windows.reach(names)]
        entries = disk.store.read_ahead(names[index:])
        while not self.given_up:
            began = perf_counter()
            entry = next(entries, None)
            stop = (index + 1) * SEGMENT
            waited += perf_counter() - began
            if entry is None or not _copy(entry, SEGMENT, full, b, (index * SEGMENT, stop)):
                break
            if stop % disk.whole == 0 and not disk.pool.windows:
                full.lengths_B[b] = stop
            self._touch(index, names[index])
            index = index + 1
            worth = worth + SEGMENT * seconds_of(entry)
            self.given_up = waited > worth
            yield int(full.lengths_B[b])
        more = not self.given_up and disk.whole == SEGMENT and self._restore_rest(full, b, prompt[:most], index)
        whole = index * SEGMENT // disk.whole * disk.whole
        if more or self._windows.restore(full, b, names, whole):
            yield int(full.lengths_B[b])

    def _restore_rest(self, full: FullView, b: int, prompt: Tokens, index: int) -> bool:
        """Let a row see the pages that a prompt has in common with the latest text behind so many segments of it."""
        start = index * SEGMENT
        entry = self._disk.store.read(self._disk.rest_name(self._name_before(prompt, index)))
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
        """Let a fresh row of the draft's view go on from the end of the latest segment that is found, if it helps."""
        names = self._named(prompt[:-1])
        needless = max(len(prompt) - 1 - view.config.layers * view.window, 0) // SEGMENT
        shape = [view.config.layers, view.config.kv_heads, view.sinks + view.window, view.config.row_size]
        for index in reversed(range(needless, len(names))):
            name = self._disk.draft_name(names[index], view)
            if not self._disk.store.folder.has(name):
                continue
            entry = self._disk.store.read(name)
            stop = (index + 1) * SEGMENT
            shape[2] = view.visible(stop)
            if entry and (layers := layers_of(entry, shape, view.dtype)):
                view.start_at(b, stop, layers)
                self._drafts.append(WaitingSegment(name, names[index], index, self._use, 0.0))
            return

    def draft_stop(self, prompt: Tokens) -> int:
        """Return after how many tokens of a prompt the draft's view is to be kept; 0: it is not."""
        return (len(prompt) - 1) // SEGMENT * SEGMENT if len(prompt) > LEAST else 0

    def keep_draft(self, view: StreamingView, b: int, prompt: Tokens) -> None:
        """Keep what the draft's view sees in row b, which has seen a prompt up to the end of a segment."""
        index = int(view.lengths_B[b]) // SEGMENT - 1
        after = self._named(prompt)[index]
        name = self._disk.draft_name(after, view)
        self._drafts.append(WaitingSegment(name, after, index, self._use, 0.0, layers=view.window_of(b)))

    def lacks(self, tokens: int) -> bool:
        """Whether many segments more could be kept of a text that has seen so many tokens."""
        return tokens >= (self._added + MANY) * SEGMENT

    def keep(self, text: Tokens, pages: Pages, midway: bool = False) -> None:
        """Have the segments of a text written behind the answer. pages: hold its KV, all of it committed.

        midway: its prompt is read on, so windows are of no use yet.
        """
        if len(text) < LEAST or self._losses != self._disk.losses:
            return
        names = self._named(text)
        for index in range(self._added, len(names)):
            after = self._name_before(text, index)
            self._disk.add(WaitingSegment(names[index], after, index, self._use, self.cost, pages))
        self._added = max(self._added, len(names))
        if not midway:
            self._windows.keep(names, len(text), self.cost, pages)
        if len(text) >= (self._prompt_tokens - 1) // PAGE * PAGE:
            self._keep_rest(text, pages)
        for draft in self._drafts:
            self._disk.add(draft)
        self._drafts.clear()

    def _keep_rest(self, text: Tokens, pages: Pages) -> None:
        """Keep the pages behind the last segment of a text, as another one may go on differently there."""
        index = len(text) // SEGMENT
        if len(ids := np.asarray(text[index * SEGMENT : len(text) // PAGE * PAGE], dtype=np.int64)):
            after = self._name_before(text, index)
            name = self._disk.rest_name(after)
            self._disk.add(WaitingSegment(name, after, index, self._use, self.cost, pages, ids=ids))

    def _name_before(self, text: Tokens, index: int) -> str:
        """Return the name that a segment follows."""
        return self._named(text)[index - 1] if index else self._root

    def _touch(self, index: int, name: str) -> None:
        """Note the use of a segment that was found, if those before it are found or kept, too."""
        if index == self._added:
            self._disk.add(WaitingSegment(name, "", index, self._use, 0.0))
            self._added += 1

    def _named(self, text: Tokens) -> list[str]:
        """Return the names of a text's whole segments. A text only grows."""
        ids = np.asarray(text[len(self._names) * SEGMENT :], dtype=np.int64)
        for start in range(0, len(ids) - SEGMENT + 1, SEGMENT):
            after = self._names[-1] if self._names else self._root
            self._names.append(self._disk.store.name(b"kv", after.encode(), ids[start : start + SEGMENT].tobytes()))
        return self._names[: len(text) // SEGMENT]


def _copy(entry: Entry, tokens: int, full: FullView, b: int, place: tuple[int, int]) -> bool:
    """Copy the first of so many tokens of an entry to their place in row b, but for those that it has seen.

    Returns whether the entry holds such.
    """
    pool = full.pool
    row = full.rows[b]
    (start, stop) = place
    some = slice(max(int(full.lengths_B[b]) - start, 0), stop - start)
    slots_N = pool.slots(row, start + some.start, stop)
    own = pool.layers(windows=False)
    layers = layers_of(entry, [len(own), pool.config.kv_heads, tokens, pool.config.row_size], pool.dtype)
    held = eagle_slots_of(entry, pool.eagle_memory, tokens) if pool.eagle_memory else None
    if layers is None or (pool.eagle_memory and held is None):
        return False
    if pool.eagle_memory and held:
        pool.eagle_memory.write(slots_N, held.part(some))
    write_layers(pool.kv, slots_N, zip(own, layers, strict=True), some)
    return True
