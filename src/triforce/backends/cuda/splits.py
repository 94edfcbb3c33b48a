"""Sizes of the splits into which attention cuts lists: enough programs to keep a device busy, few sums to merge.

Bits depend on the size, so it depends on the kind of list and model, not on a list's length. Figures are those of an
H200 (docs/gpu.md); the size for windows has not been measured.
"""

from __future__ import annotations

SHARED = 1024
BY_HEAD = 256
BY_HEAD_OF_GROUPS = 128
WINDOW = 64
"""Keys of a split for each kind of list, all multiples of 64.

A list of all keys is long, and each split writes float32 sums of each query row, which the merge reads; 2,048 keys are
up to 6 % faster at 128K, but leave 32 programs at 8K with eight heads. No length below 64K has been timed. Lists of
single KV heads are short, and with grouped queries there are few heads; a draft's window is shorter still, and its
model has a few heads.
"""


def split_of(by_head: bool, window: int, group: int) -> int:
    """Return the keys of a split. group: query heads of a KV head."""
    if window:
        return WINDOW
    if by_head:
        return BY_HEAD_OF_GROUPS if group > 1 else BY_HEAD
    return SHARED
