"""Pages carried from one memory to another, by lists that lie on the device: nothing waits for the host.

Either side may be pinned host memory, which a CUDA device reads and writes by itself. X places of pages, counted from
the start of a memory in pages; a page is of one KV head, its keys in one tensor and its values in another one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.triton import interpreted
from triforce.backends.kernel_api import KeysValues

SOME = 32
"""Places that a program looks at: few of them are wanted, as a rule, and what is idle is to be soon gone."""


def carry(source: KeysValues, from_X: Tensor, target: KeysValues, to_X: Tensor, size: int) -> None:
    """Page `from_X[x]` of a memory to place `to_X[x]` of another one; nothing where `to_X` is 0.

    Memories are contiguous from the start of each tensor on, in pages of `size` numbers. Both lists are int64.
    """
    if count := from_X.numel():
        some, at_once = (min(triton.next_power_of_2(count), 1024),) * 2 if interpreted() else (SOME, 2)
        _carry[(triton.cdiv(count, some),)](
            *source, *target, from_X, to_X, count, size, triton.next_power_of_2(size), some, at_once
        )


@triton.jit
def _carry(
    keys, values, to_keys, to_values, from_, to, X, SIZE: tl.constexpr, SIZE2: tl.constexpr, SOME: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Some pages, a few at once; a program of none ends when it has looked."""
    first, e = tl.program_id(0) * SOME, tl.arange(0, SIZE2)
    all_X = first + tl.arange(0, SOME)
    if tl.max(tl.load(to + all_X, mask=all_X < X, other=0), 0) == 0:
        return
    for start in range(first, first + SOME, AT_ONCE):
        x_X = start + tl.arange(0, AT_ONCE)
        to_X = tl.load(to + x_X, mask=x_X < X, other=0)
        here_X = to_X > 0
        from_X = tl.load(from_ + x_X, mask=here_X, other=0)
        read_XE = from_X[:, None] * SIZE + e[None, :]
        write_XE = to_X[:, None] * SIZE + e[None, :]
        mask_XE = here_X[:, None] & (e < SIZE)[None, :]
        tl.store(to_keys + write_XE, tl.load(keys + read_XE, mask=mask_XE, other=0.0), mask=mask_XE)
        tl.store(to_values + write_XE, tl.load(values + read_XE, mask=mask_XE, other=0.0), mask=mask_XE)
