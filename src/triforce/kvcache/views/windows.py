"""Page tables of models whose layers see windows of different sizes, each cut out of a table of whole rows.

Layers with a window may have pages of their own (see `window_pages`), whose table names those that are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from triforce.backends.kernel_api import PageTable
from triforce.kvcache.pool import PagePool


def by_window(pool: PagePool, lists: PageTable, rows: range) -> list[tuple[int, PageTable]]:
    """Return the page tables of all layers in order, and for how many each counts. `lists`: of whole rows."""
    see = windowed(pool, lists, rows)
    return [(len([*group]), see(window)) for window, group in groupby(pool.config.windows)]


def windowed(pool: PagePool, lists: PageTable, rows: range) -> Callable[[int], PageTable]:
    """Return what gives, for a window, the page table of layers that have it; 0: they see all of whole rows."""
    units_BU = pool.units(rows, lists.unit, windows=True)
    return lambda window: replace(lists, units=units_BU, window=window, coarse=[]) if window else lists
