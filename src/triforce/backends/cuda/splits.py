"""Keys of the splits that attention cuts lists into: enough programs to keep a device busy, few sums to merge.

Bits depend on it, so it depends on the kind of a list and on the shape of a pass, and not on how long a list is. All
figures wait for a GPU.
"""

from __future__ import annotations

SHARED, SHARED_WIDE, BY_HEAD, BY_HEAD_OF_GROUPS, WINDOW = 512, 1024, 256, 128, 64
"""Keys of a split, all multiples of 64.

A list of all keys is long. Each split leaves float32 sums of each query row, written and read: of wide passes as many
bytes as an eighth of the keys and values, with 512. Lists of each KV head's own are short, and with grouped queries
there are few heads; a draft's window is shorter still, and its model has a few heads.
"""
WIDE = 16
"""Query rows of a KV head beyond which a pass is wide: the rows of the smallest tile."""


def split_of(by_head: bool, window: int, rows: int, group: int) -> int:
    """Return the keys of a split. rows: queries of a KV head in this pass; group: query heads of a KV head."""
    if window:
        return WINDOW
    if by_head:
        return BY_HEAD_OF_GROUPS if group > 1 else BY_HEAD
    return SHARED_WIDE if rows > WIDE else SHARED
