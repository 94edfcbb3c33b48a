"""The noise of `backends.torch.noise` in one launch. Torch lacks 32-bit unsigned arithmetic and needs many launches.

N positions, P pairs of tokens, V vocabulary, B rows, n draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.triton import interpreted


def exponentials(seeds_N: Tensor, choices_N: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
    """Return Exp(1) variates, float64 (N, V): Philox4x32-10 of key `seed`, counter (token // 2, position, choice, 0).

    All inputs are int64; seeds have 64 bits, so they may be negative.
    """
    out_NV = torch.empty(len(seeds_N), vocab_size, dtype=torch.float64, device=seeds_N.device)
    pairs = 1 << 15 if interpreted() else 512
    if len(seeds_N):
        grid = (triton.cdiv((vocab_size + 1) // 2, pairs), len(seeds_N))
        noise_keys = (x_N.contiguous() for x_N in (seeds_N, choices_N, positions_N))
        _exponentials[grid](*noise_keys, out_NV, vocab_size, pairs)
    return out_NV


def uniforms(seeds_B: Tensor, choices_B: Tensor, draws_B: Tensor, tier: int, n: int) -> Tensor:
    """Return uniforms in [0, 1), float64 (B, n): counter (draw low, draw high, choice, 1 + tier), from `draws_B` on."""
    out_Bn = torch.empty(len(seeds_B), n, dtype=torch.float64, device=seeds_B.device)
    if out_Bn.numel():
        _uniforms[(len(seeds_B),)](seeds_B, choices_B, draws_B, out_Bn, tier + 1, n, triton.next_power_of_2(n))
    return out_Bn


@triton.jit(do_not_specialize=["kind", "n"])
def _uniforms(seeds, choices, draws, out, kind, n, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    draw_n = tl.load(draws + b) + i
    zero_n = tl.full([WIDTH], 0, tl.uint32)
    choice_n = zero_n + tl.load(choices + b).to(tl.uint32)
    kind_n = zero_n + kind.to(tl.uint32)
    low_n = draw_n.to(tl.uint32)
    high_n = (draw_n >> 32).to(tl.uint32)
    w0, w1, _, _ = tl.philox(tl.load(seeds + b), low_n, high_n, choice_n, kind_n)
    tl.store(out + b * n + i, _bits(w0, w1).to(tl.float64) * 1.1102230246251565e-16, mask=i < n)


@triton.jit
def _exponentials(seeds, choices, positions, out, V, PAIRS: tl.constexpr):
    pair_P = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    n = tl.program_id(1)
    zero_P = tl.full([PAIRS], 0, tl.uint32)
    position_P = zero_P + tl.load(positions + n).to(tl.uint32)
    choice_P = zero_P + tl.load(choices + n).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + n), pair_P.to(tl.uint32), position_P, choice_P, zero_P)
    to_P = out + n.to(tl.int64) * V + 2 * pair_P
    tl.store(to_P, _exponential(w0, w1), mask=2 * pair_P < V)
    tl.store(to_P + 1, _exponential(w2, w3), mask=2 * pair_P + 1 < V)


@triton.jit
def exponential_of(seed, choice, position, token_N):
    """Return the exponentials of some tokens at one position."""
    zero_N = (token_N * 0).to(tl.uint32)
    position_N = zero_N + position.to(tl.uint32)
    choice_N = zero_N + choice.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (token_N // 2).to(tl.uint32), position_N, choice_N, zero_N)
    return _exponential(tl.where(token_N % 2 == 0, w0, w2), tl.where(token_N % 2 == 0, w1, w3))


@triton.jit
def _exponential(high_P, low_P):
    """Return the exponential of an odd multiple of 2 ** -53, which is neither 0 nor 1."""
    return -tl.log((_bits(high_P, low_P) | 1).to(tl.float64) * 1.1102230246251565e-16)


@triton.jit
def _bits(high, low):
    """Return 53 random bits from two 32-bit words."""
    return (high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)
