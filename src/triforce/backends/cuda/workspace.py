"""Memory that a pass works with beside its inputs: sums of attention until all are merged, and what it tells."""

from __future__ import annotations

from triforce.backends.cuda.graphs import bucket
from triforce.backends.cuda.splits import SHARED
from triforce.backends.kernel_api import PAGE
from triforce.model.config import ModelConfig


def workspace(config: ModelConfig, itemsize: int, rows: int, width: int, pages: int, unit: int = PAGE) -> int:
    """Return its bytes in a pass that observes the mass: of so many rows, tokens a row, and pages of the longest row.

    All are padded as passes are. Each query has float32 sums, a peak and a total of each split, and a log-sum-exp of
    each unit, so many tokens of a page. What a pass tells is the mass of each layer's units and its queries, of which
    there are two copies while those of the layers become one, and logits. itemsize: bytes of a query's number.
    """
    rows, width, pages = bucket(rows), bucket(width), bucket(pages, 64)
    splits, units = -(-pages * PAGE // SHARED), pages * PAGE // unit
    sums = 4 * rows * width * config.heads * (splits * (config.head_dim + 2) + units + 1)
    queries = itemsize * width * config.heads * config.head_dim
    told = 2 * config.layers * rows * (4 * config.kv_heads * units + queries)
    return sums + told + 4 * rows * width * config.vocab_size
