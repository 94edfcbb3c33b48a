"""The exponentials of `sampling.noise`, in one launch: there a hundred, as torch has no 32-bit unsigned arithmetic.

N places, P pairs of tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.kernels.triton import interpreted


def exponentials(seeds_N: Tensor, choices_N: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) variates, float64 (N, V): Philox4x32-10 of key `seed` and counter (token // 2, position, choice, 0).

    All int64; seeds are 64 bits, and so perhaps negative.
    """
    out_NV = torch.empty(len(seeds_N), vocab_size, dtype=torch.float64, device=seeds_N.device)
    pairs = 1 << 15 if interpreted() else 512
    if len(seeds_N):
        grid = (triton.cdiv((vocab_size + 1) // 2, pairs), len(seeds_N))
        each = (x_N.contiguous() for x_N in (seeds_N, choices_N, positions_N))
        _exponentials[grid](*each, out_NV, vocab_size, pairs)
    return out_NV


@triton.jit
def _exponentials(seeds, choices, positions, out, V, PAIRS: tl.constexpr):
    pair_P, n = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.program_id(1)
    zero_P = tl.full([PAIRS], 0, tl.uint32)
    position_P = zero_P + tl.load(positions + n).to(tl.uint32)
    choice_P = zero_P + tl.load(choices + n).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + n), pair_P.to(tl.uint32), position_P, choice_P, zero_P)
    to_P = out + n.to(tl.int64) * V + 2 * pair_P
    tl.store(to_P, _exponential(w0, w1), mask=2 * pair_P < V)
    tl.store(to_P + 1, _exponential(w2, w3), mask=2 * pair_P + 1 < V)


@triton.jit
def _exponential(high_P, low_P):
    """Of an odd multiple of 2 ** -53, which is neither 0 nor 1."""
    bits_P = (high_P.to(tl.int64) << 21) | (low_P.to(tl.int64) >> 11) | 1
    return -tl.log(bits_P.to(tl.float64) * 1.1102230246251565e-16)
