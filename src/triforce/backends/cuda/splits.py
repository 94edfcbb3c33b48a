"""Sizes of the splits into which attention cuts keys: enough programs to keep a device busy, few sums to merge.

The size decides the bits, so it depends on the kind of page table and the model, not on the number of keys. Figures are
those of an H200 (docs/contributing/gpu-kernels.md); the size for windows has not been measured.
"""

from __future__ import annotations


def bucket(size: int, minimum: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `minimum`; 0 for a size of 0."""
    return 1 << (max(size, minimum) - 1).bit_length() if size else 0


SHARED_UNITS = 1024
BY_HEAD = 256
BY_HEAD_OF_GROUPS = 128
WINDOW = 64
"""Keys of a split for each kind of page table, all multiples of 64.

`SHARED_UNITS`: all KV heads share the units, which cover all keys. Each split writes float32 sums per query row, which
the merge reads, so splits are long. Splits of 2,048 keys are up to 6 % faster at 128K, but 8K keys of eight heads then
make 32 programs only. No length below 64K has been timed. `BY_HEAD`: each KV head has a short list of its own.
`BY_HEAD_OF_GROUPS`: the same with grouped queries, where KV heads are few. `WINDOW`: the short window of a draft with
few heads.
"""


def split_of(by_head: bool, window: int, group: int) -> int:
    """Return the keys of a split. group: query heads of a KV head."""
    if window:
        return WINDOW
    if by_head:
        return BY_HEAD_OF_GROUPS if group > 1 else BY_HEAD
    return SHARED_UNITS
