"""Memory that attention works with beside its inputs: what each split of the keys has come to, until all are merged."""

from __future__ import annotations

from triforce.backends.cuda.graphs import bucket
from triforce.backends.cuda.splits import split_of
from triforce.backends.kernel_api import PAGE
from triforce.model.config import ModelConfig


def workspace(config: ModelConfig, rows: int, width: int, pages: int) -> int:
    """Return its bytes in a pass that observes the mass: of so many rows, tokens a row, and pages of the longest row.

    All are padded as passes are. Each query has float32 sums, a peak and a total of each split, and a log-sum-exp of
    each page.
    """
    rows, width, pages = bucket(rows), bucket(width), bucket(pages, 64)
    group = config.heads // config.kv_heads
    splits = -(-pages * PAGE // split_of(False, 0, width * group, group))
    return 4 * rows * width * config.heads * (splits * (config.head_dim + 2) + pages + 1)
