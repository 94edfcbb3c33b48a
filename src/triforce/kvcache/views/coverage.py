"""The parts of a text that a retrieval view reads, for people to look at."""

from __future__ import annotations

import numpy as np

from triforce.kvcache.swap import places
from triforce.kvcache.views.retrieval import RetrievalView

PARTS = 256
"""A picture of a text is cut into so many parts at most."""


def coverage(view: RetrievalView, b: int) -> list[int]:
    """Return, for equal parts of row b's text from its start, the percentage of lists that its tokens stand in.

    There is a list for each layer and KV head; layers that see or search everything are left out.
    """
    units = -(-int(view.full.lengths_B[b]) // view.unit)
    starts = np.arange(0, units, -(-units // PARTS) or 1)
    row, config = view.selections[b], view.full.pool.config
    layers = [layer for layer in range(config.layers) if layer not in view.full_layers | view.searched_layers]
    if row.pages is None or not layers:
        return [100] * len(starts)
    seen = places(row.pages.units[layers], view.row_units(b)).flatten().cpu().numpy()
    counts_U = np.bincount(seen, minlength=units)[:units]
    lists = len(layers) * config.kv_heads
    counts_U[row.window_start // view.unit :] = lists
    sizes = np.diff([*starts, units])
    percents: list[int] = np.rint(np.add.reduceat(counts_U, starts) * 100 / (sizes * lists)).astype(int).tolist()
    return percents
