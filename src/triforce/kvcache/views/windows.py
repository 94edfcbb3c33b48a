"""Page tables of models whose layers see windows of different sizes, each cut out of one table of whole rows.

KV is kept whole, in the same pages, for all layers: what a window hides is not read, and not forgotten.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from triforce.backends.kernel_api import PageTable
from triforce.model.config import ModelConfig


def by_window(config: ModelConfig, lists: PageTable) -> list[tuple[int, PageTable]]:
    """Return the page tables of all layers in order, and for how many each counts. `lists`: of whole rows."""
    return [(len([*group]), windowed(lists, window)) for window, group in groupby(config.windows)]


def windowed(lists: PageTable, window: int) -> PageTable:
    """Return what layers with such a window see of whole rows; 0: all of it."""
    return replace(lists, window=window, coarse=[]) if window else lists
