"""Memory that a pass works with beside its inputs: sums of attention until all are merged, and what it tells."""

from __future__ import annotations

from triforce.backends.cuda.graphs import bucket
from triforce.backends.cuda.splits import SHARED
from triforce.backends.kernel_api import PAGE
from triforce.model.config import ModelConfig


def workspace(config: ModelConfig, itemsize: int, rows: int, width: int, pages: int) -> int:
    """Return its bytes in a pass that observes the mass: of so many rows, tokens a row, and pages of the longest row.

    All are padded as passes are. Each query has float32 sums, a peak and a total of each split, and a log-sum-exp of
    each page. What a pass tells is the mass of each layer's pages and its queries, of which there are two copies while
    those of the layers become one, and logits. itemsize: bytes of a query's number.
    """
    rows, width, pages = bucket(rows), bucket(width), bucket(pages, 64)
    splits = -(-pages * PAGE // SHARED)
    sums = 4 * rows * width * config.heads * (splits * (config.head_dim + 2) + pages + 1)
    queries = itemsize * width * config.heads * config.head_dim
    told = 2 * config.layers * rows * (4 * config.kv_heads * pages + queries)
    return sums + told + 4 * rows * width * config.vocab_size
