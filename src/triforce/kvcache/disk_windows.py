"""DiskWindows: what layers with a window have of one text, on its way from the disk cache and to it.

Of each segment that is an entry of its own, written while its pages are there, so of the last ones of a text. A text
can go on behind a segment before which the windows are there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from triforce.backends.kernel_api import PAGE
from triforce.disk_cache.entry import Entry
from triforce.disk_cache.entry_store import Use
from triforce.kvcache.disk_parts import WINDOWS, layers_of
from triforce.kvcache.disk_prefixes import SEGMENT, DiskPrefixes, Pages, WaitingSegment
from triforce.kvcache.views.full import FullView, LayerKV, write_layers


class DiskWindows:
    """Windows of one text, whose request is `use`; there are none where all layers have the same pages."""

    def __init__(self, disk: DiskPrefixes, use: Use) -> None:
        self._disk, self._use, self._windows = disk, use, disk.pool.windows
        self._added = 0

    def reach(self, names: Sequence[str]) -> int:
        """Count the first of these segments that are there, and before whose end the windows are; or all of them."""
        if self._windows is None:
            return len(names)
        has, step = self._disk.store.folder.has, self._disk.whole // SEGMENT
        known = sum(1 for _ in takewhile(has, names)) // step * step
        for stop in range(known, 0, -step):
            first = self._windows.needed_from(stop * SEGMENT) * PAGE // SEGMENT
            if all(has(self._disk.windows_name(name)) for name in names[first:stop]):
                return stop
        return 0

    def restore(
        self, full: FullView, b: int, names: Sequence[str], stop: int, rest: list[LayerKV] | None = None
    ) -> bool:
        """Let row b of an exact view, whose other layers hold so many tokens, see them, if the windows are found.

        names: of its segments. rest: what these layers have behind them.
        """
        windows, pool, row = full.pool.windows, full.pool, full.rows[b]
        if windows is None or stop <= full.lengths_B[b]:
            return False
        first, found = windows.needed_from(stop) * PAGE, list[tuple[int, list[LayerKV]]]()
        for start in range(first // SEGMENT * SEGMENT, stop, SEGMENT):
            index = start // SEGMENT
            layers = rest if index == len(names) else self._segment(names[index], index)
            if layers is None:
                return False
            found.append((start, layers))
        windows.forget(row)
        windows.place(row, first, stop)
        for start, layers in found:
            here = slice(max(start, first), min(start + SEGMENT, stop))
            slots_N, some = windows.slots(row, here.start, here.stop), slice(here.start - start, here.stop - start)
            write_layers(pool.kv, slots_N, zip(pool.layers(windows=True), layers, strict=True), some)
        full.lengths_B[b] = stop
        return True

    def keep(self, names: Sequence[str], tokens: int, cost: float, pages: Pages) -> None:
        """Have what is still there of a text of so many tokens written behind the answer; names: of its segments."""
        if self._windows is None:
            return
        first = -(-self._windows.kept_from(tokens) * PAGE // SEGMENT)
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
