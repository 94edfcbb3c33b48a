"""Index arithmetic of ragged batches: on the host, in numpy, where an operation costs half a microsecond.

Shape suffix: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def columns(start_B: Ints, width: int) -> Ints:
    """Return (B, width): start_B, start_B + 1, ..."""
    return start_B[:, None] + _counting(width)


def rows(count: int) -> Ints:
    """Return (B, 1): 0, 1, ..., `count` - 1, which indexes the rows of an array together with `columns`."""
    return _counting(count)[:, None]


def ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    a = list(a)
    b = list(b)
    shared_length = 0
    upper_bound = min(len(a), len(b))
    while shared_length < upper_bound:  # slices compare in one operation, and are halved where they differ
        middle = (shared_length + upper_bound + 1) // 2
        if a[shared_length:middle] == b[shared_length:middle]:
            shared_length = middle
        else:
            upper_bound = middle - 1
    return shared_length


@cache
def _counting(width: int) -> Ints:
    """Return 0, 1, ..., read-only: cached, as each round needs it many times."""
    counting = np.arange(width)
    counting.flags.writeable = False
    return counting
