"""Rotation of heads by Hadamard matrices, on the device: what `kv_rows.rotated_head` does, with its bits.

Shape suffixes: M heads of tokens, D head size, in a power of two with zeros behind.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_heads(x_MD, d_1D, TOGETHER: tl.constexpr):
    """Heads in float32, so many channels of each rotated together, a power of two; 1: as they are. d: 0, 1, 2, ..."""
    if TOGETHER > 1:
        place_MD = tl.broadcast_to(d_1D, x_MD.shape)
        for stage in tl.static_range(TOGETHER.bit_length() - 1):
            other_MD = tl.gather(x_MD, place_MD ^ (1 << stage), 1)
            x_MD = tl.where((place_MD >> stage) % 2 == 1, other_MD - x_MD, x_MD + other_MD)
        x_MD *= TOGETHER**-0.5
    return x_MD
