"""Selection of the highest scores of each row, in column order. G rows, N columns, P picks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_CANDIDATES = 1 << 13
"""Most columns that a program holds in registers without spills on every architecture: 131,072 tokens in pages."""


def best(scores_GN: Tensor, candidates: range, picks: int) -> Tensor:
    """Return the columns of the `picks` highest float32 scores among `candidates`, ascending, the lowest among equals.

    int64 (G, P). NaN is above all other scores. At most `MAX_CANDIDATES` candidates.
    """
    ids_GP = torch.empty(len(scores_GN), picks, dtype=torch.long, device=scores_GN.device)
    if picks and len(scores_GN):
        size = max(32, triton.next_power_of_2(len(candidates)))
        _best[(len(scores_GN),)](
            scores_GN.contiguous(), ids_GP, scores_GN.shape[1], candidates.start, candidates.stop, picks, size,
            num_warps=min(16, max(4, size // 1024)),
        )  # fmt: skip
    return ids_GP


@triton.jit
def _best(scores, ids, N, start, stop, picks, SIZE: tl.constexpr):
    """Select one row's columns, with the largest threshold that `picks` scores reach, found bit by bit."""
    row = tl.program_id(0).to(tl.int64)
    column_N = start + tl.arange(0, SIZE)
    inside_N = column_N < stop
    score_N = tl.load(scores + row * N + column_N, mask=inside_N, other=0.0) + 0.0  # so that -0.0 equals 0.0
    bits_N = score_N.to(tl.uint32, bitcast=True)
    # Unsigned integers in the order of the scores.
    order_N = tl.where(bits_N >> 31 == 1, bits_N ^ 0xFFFFFFFF, bits_N | 0x80000000)
    order_N = tl.where(score_N != score_N, 0xFFFFFFFF, order_N).to(tl.uint32)
    threshold = tl.full([], 0, tl.uint32)
    for bit in range(32):
        higher = threshold | (tl.full([], 0x80000000, tl.uint32) >> bit)
        enough = tl.sum((inside_N & (order_N >= higher)).to(tl.int32), 0) >= picks
        threshold = tl.where(enough, higher, threshold)
    above_N = inside_N & (order_N > threshold)
    equal_N = inside_N & (order_N == threshold)
    room = picks - tl.sum(above_N.to(tl.int32), 0)
    keep_N = above_N | (equal_N & (tl.cumsum(equal_N.to(tl.int32), 0) <= room))
    place_N = tl.cumsum(keep_N.to(tl.int32), 0) - 1
    tl.store(ids + row * picks + place_N, column_N.to(tl.int64), mask=keep_N)
