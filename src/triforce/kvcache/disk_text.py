"""DiskText: one text on its way from the disk cache and to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from triforce.disk_cache.entry_store import Use
from triforce.kvcache.disk_prefixes import SEGMENT, DiskPrefixes, Pages, WaitingSegment, features_of, layers_of
from triforce.kvcache.views.full import TAIL, FullView, write_layers
from triforce.kvcache.views.streaming import StreamingView
from triforce.ragged import Ints

LEAST = 512
"""Tokens of a text that is kept, at least. A shorter one is read in no time."""
MANY = 16
"""Segments of a prompt that are kept together while it is read; the rest once it is read or given up."""
GRACE = 0.25
"""Seconds of reading from disk that are not compared with anything: nobody would notice the difference."""

Tokens = Sequence[int] | Ints


class DiskText:
    """The segments of one text. use: that of its request, whose texts share it."""

    def __init__(self, disk: DiskPrefixes, scope: str, use: Use) -> None:
        self._disk, self._use = disk, use
        self._names, self._root = list[str](), disk.root(scope)
        self._added = 0
        self._drafts: list[WaitingSegment] = []
        self.cost = 0.0
        """Seconds that the prefill of its prompt took for a token."""

    def restore(self, full: FullView, b: int, prompt: Tokens) -> Iterator[int]:
        """Let row b of an exact view see more of a prompt, as far as segments of it are found. Yields how much.

        Its last tokens are left to be fed, as a selection goes by them. It ends early where reading takes longer than a
        prefill did when the segments were made.
        """
        disk, pool, row = self._disk, full.pool, full.rows[b]
        shape = [pool.config.layers, pool.config.kv_heads, SEGMENT, pool.config.row_size]
        seen, spent, worth = int(pool.lengths_B[row]), 0.0, GRACE
        most = (len(prompt) - 1 - TAIL) // disk.whole * disk.whole
        names, index = self._named(prompt[: max(most, 0)]), seen // SEGMENT
        entries = disk.store.read_ahead(names[index:])
        while spent <= worth:
            began = perf_counter()
            entry = next(entries, None)
            if entry is None or (layers := layers_of(entry, shape, pool.dtype)) is None:
                return
            start, stop = index * SEGMENT, (index + 1) * SEGMENT
            first = max(seen - start, 0)
            if pool.features:
                if (held := features_of(entry, pool.features)) is None:
                    return
                pool.features.write(pool.slots(row, start + first, stop), held.behind(first))
            some = ((keys[:, first:], values[:, first:]) for keys, values in layers)
            write_layers(pool.kv, pool.slots(row, start + first, stop), some)
            if stop % disk.whole == 0:
                pool.lengths_B[row] = stop
            self._touch(index, names[index])
            index, spent = index + 1, spent + perf_counter() - began
            worth += SEGMENT * float(entry.facts["seconds_per_token"])
            yield int(pool.lengths_B[row])

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

    def keep(self, text: Tokens, pages: Pages) -> None:
        """Have the segments of a text written behind the answer. pages: hold its KV, all of it committed."""
        if len(text) < LEAST:
            return
        names = self._named(text)
        for index in range(self._added, len(names)):
            after = names[index - 1] if index else self._root
            self._disk.add(WaitingSegment(names[index], after, index, self._use, self.cost, pages))
        self._added = max(self._added, len(names))
        for draft in self._drafts:
            self._disk.add(draft)
        self._drafts.clear()

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
