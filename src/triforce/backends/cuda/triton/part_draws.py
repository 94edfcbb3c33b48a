"""Jitted parts of the sampler of several programs a column: draws from what the cuts have left, by all parts at once.

A column's list is cut into parts of N tokens; counts (B, J) say how long it is. Shape suffixes as in `column_parts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triforce.backends.cuda.triton.rng import exponential_of


@triton.jit
def peak_of(peaks, C, C2: tl.constexpr):
    """The largest of all parts' peaks: NaN if one of them is."""
    c_C = tl.arange(0, C2)
    peak_C = tl.load(peaks + c_C, mask=c_C < C, other=-float("inf"))
    return tl.where(tl.max((peak_C != peak_C).to(tl.int32), 0) > 0, float("nan"), tl.max(peak_C, 0))


@triton.jit(do_not_specialize=["J", "C"])
def race_parts(places, ids, values, counts, divisors, seeds, choices, bests, winners, J, C, N: tl.constexpr):
    """The token of a part with the largest probability / exponential, the lowest id among equals."""
    c, j, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cell, lane_N = (b * J + j).to(tl.int64), tl.arange(0, N)
    count = tl.load(counts + cell) - c * N
    best, winner = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
    if count > 0:
        at_N, real_N = (cell * C + c) * N + lane_N, lane_N < count
        id_N = tl.load(ids + at_N, mask=real_N, other=0x7FFFFFFF)
        share_N = tl.load(values + at_N, mask=real_N, other=0.0) / tl.load(divisors + cell)
        position = tl.load(places + b) + j
        ratio_N = share_N / exponential_of(tl.load(seeds + b), tl.load(choices + b), position, id_N)
        best = tl.max(ratio_N, 0)
        winner = tl.min(tl.where(ratio_N == best, id_N, 0x7FFFFFFF), 0)
    tl.store(bests + cell * C + c, best)
    tl.store(winners + cell * C + c, winner)


@triton.jit(do_not_specialize=["B", "J", "C"])
def close_race(peaks, bests, winners, out, B, J, C, C2: tl.constexpr):
    """The winner of all parts, the lowest id among equals, and the column's peak."""
    cell, c_C = tl.program_id(1) * J + tl.program_id(0), tl.arange(0, C2)
    best_C = tl.load(bests + cell * C + c_C, mask=c_C < C, other=0.0)
    best = tl.max(best_C, 0)
    winner_C = tl.load(winners + cell * C + c_C, mask=(c_C < C) & (best_C == best), other=0x7FFFFFFF)
    winner = tl.min(winner_C, 0)
    tl.store(out + cell, tl.where(best > 0, winner, 0).to(tl.int64))
    tl.store(out + B * J + cell, peak_of(peaks + cell * C, C, C2).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["B", "J", "C", "guess_row_stride", "guess_stride"])
def share_parts(
    places, ids, values, counts, divisors, guessed, laws, sums, B, J, V, C, guess_row_stride, guess_stride,
    N: tl.constexpr,
):  # fmt: skip
    """A part's law, in its list too, and what it holds: of max(p - q, 0) where a guess is judged, and of p."""
    c, j, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cell, lane_N = (b * J + j).to(tl.int64), tl.arange(0, N)
    count = tl.load(counts + cell) - c * N
    left, whole = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    if count > 0:
        at_N, real_N = (cell * C + c) * N + lane_N, lane_N < count
        id_N = tl.load(ids + at_N, mask=real_N, other=0)
        p_N = tl.load(values + at_N, mask=real_N, other=0.0) / tl.load(divisors + cell)
        tl.store(values + at_N, p_N, mask=real_N)
        tl.store(laws + cell * V + id_N, p_N, mask=real_N)
        guessed += b.to(tl.int64) * guess_row_stride + j.to(tl.int64) * guess_stride
        q_N = tl.load(guessed + id_N, mask=real_N & (j < tl.load(places + B + b)), other=0.0)
        left, whole = tl.sum(tl.maximum(p_N - q_N, 0.0), 0), tl.sum(p_N, 0)
    tl.store(sums + cell * C + c, left)
    tl.store(sums + (B * J + cell) * C + c, whole)


@triton.jit(do_not_specialize=["B", "J", "C", "guess_row_stride", "guess_stride"])
def judge_parts(
    places, peaks, ids, values, counts, sums, tokens, uniforms, guessed, laws, out, B, J, V, C, guess_row_stride,
    guess_stride, N: tl.constexpr, C2: tl.constexpr,
):  # fmt: skip
    """One column's verdict: keeps the guess, or draws what follows instead of it."""
    j, b = tl.program_id(0), tl.program_id(1)
    cell, last, verdict = (b * J + j).to(tl.int64), tl.load(places + B + b), tl.full([], 0, tl.int32)
    peak = peak_of(peaks + cell * C, C, C2)
    if (j <= last) & (tl.abs(peak) < float("inf")):
        guessed += b.to(tl.int64) * guess_row_stride + j.to(tl.int64) * guess_stride
        token = tl.load(tokens + b * (J - 1) + j, mask=j < last, other=0)
        p, q = tl.load(laws + cell * V + token), tl.load(guessed + token, mask=j < last, other=0.0)
        uniform = tl.load(uniforms + b * J + 1 + j, mask=j < last, other=0.0)
        if (j < last) & (uniform * q < p):
            verdict = tl.full([], -1, tl.int32)
        else:
            ids, values, sums = ids + cell * C * N, values + cell * C * N, sums + cell * C
            count, uniform = tl.load(counts + cell), tl.load(uniforms + b * J)
            verdict = _draw(ids, values, count, sums, guessed, j < last, uniform, B * J * C, C, N, C2)
    tl.store(out + cell, verdict.to(tl.int64))
    tl.store(out + B * J + cell, peak.to(tl.int64, bitcast=True))


@triton.jit
def _draw(ids, values, count, sums, guessed, refused, uniform, whole, C, N: tl.constexpr, C2: tl.constexpr):
    """A token of max(p - q, 0), or of p where nothing was refused or that is empty, by inversion: its part, then it.

    A scan may round a prefix below one before it, so what holds nothing is left out, and where none passes it is the
    last of the others. Sums of p lie `whole` behind those of residuals.
    """
    c_C, lane_N = tl.arange(0, C2), tl.arange(0, N)
    held_C = tl.load(sums + c_C, mask=c_C < C, other=0.0)
    if refused & (tl.sum(held_C, 0) == 0):  # p == q up to rounding
        refused = tl.full([], False, tl.int1)
        held_C = tl.load(sums + whole + c_C, mask=c_C < C, other=0.0)
    upto_C = tl.cumsum(held_C, 0)
    total = tl.sum(tl.where(c_C == C - 1, upto_C, 0.0), 0)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # uniform * total may round up to it
    end = tl.minimum(uniform * total, below)
    c = tl.min(tl.where((held_C > 0) & (upto_C > end), c_C, 0x7FFFFFFF), 0)
    c = tl.where(c == 0x7FFFFFFF, tl.max(tl.where(held_C > 0, c_C, 0), 0), c)
    before = tl.sum(tl.where(c_C == c - 1, upto_C, 0.0), 0)
    real_N = c * N + lane_N < count
    id_N = tl.load(ids + c * N + lane_N, mask=real_N, other=0)
    p_N = tl.load(values + c * N + lane_N, mask=real_N, other=0.0)
    residual_N = tl.maximum(p_N - tl.load(guessed + id_N, mask=real_N & refused, other=0.0), 0.0)
    passes_N = (residual_N > 0) & (before + tl.cumsum(residual_N, 0) > end)
    token = tl.min(tl.where(passes_N, id_N, 0x7FFFFFFF), 0)
    return tl.where(token == 0x7FFFFFFF, tl.max(tl.where(residual_N > 0, id_N, 0), 0), token)
