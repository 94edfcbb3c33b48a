"""DiskText: one text on its way from the disk cache and to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from triforce.backends.kernel_api import PAGE
from triforce.disk_cache.entry import Entry
from triforce.disk_cache.entry_store import Use
from triforce.kvcache.disk_parts import features_of, ids_of, layers_of, seconds_of
from triforce.kvcache.disk_prefixes import SEGMENT, DiskPrefixes, Pages, WaitingSegment
from triforce.kvcache.disk_windows import DiskWindows
from triforce.kvcache.views.full import TAIL, FullView, write_layers
from triforce.kvcache.views.streaming import StreamingView
from triforce.ragged import Ints, common_prefix

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
        self._disk, self._use, self._prompt_tokens = disk, use, prompt_tokens
        self._names, self._root = list[str](), disk.root(scope)
        self._windows = DiskWindows(disk, use)
        self._added, self._losses = 0, disk.losses
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
        disk, most, index = self._disk, max(len(prompt) - 1 - TAIL, 0), int(full.lengths_B[b]) // SEGMENT
        names, waited, worth = self._named(prompt[: most // disk.whole * disk.whole]), 0.0, GRACE
        names = names[: self._windows.reach(names)]
        entries = disk.store.read_ahead(names[index:])
        while not self.given_up:
            began = perf_counter()
            entry, stop = next(entries, None), (index + 1) * SEGMENT
            waited += perf_counter() - began
            if entry is None or not _copy(entry, SEGMENT, full, b, (index * SEGMENT, stop)):
                break
            if stop % disk.whole == 0 and not disk.pool.windows:
                full.lengths_B[b] = stop
            self._touch(index, names[index])
            index, worth = index + 1, worth + SEGMENT * seconds_of(entry)
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
            entry, stop = self._disk.store.read(name), (index + 1) * SEGMENT
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
    pool, row, (start, stop) = full.pool, full.rows[b], place
    some = slice(max(int(full.lengths_B[b]) - start, 0), stop - start)
    slots_N = pool.slots(row, start + some.start, stop)
    own = pool.layers(windows=False)
    layers = layers_of(entry, [len(own), pool.config.kv_heads, tokens, pool.config.row_size], pool.dtype)
    held = features_of(entry, pool.features, tokens) if pool.features else None
    if layers is None or (pool.features and held is None):
        return False
    if pool.features and held:
        pool.features.write(slots_N, held.part(some))
    write_layers(pool.kv, slots_N, zip(own, layers, strict=True), some)
    return True
