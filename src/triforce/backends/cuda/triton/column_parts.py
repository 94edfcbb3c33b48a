"""Sampling as in `sampler`, by several programs per column, each for one part of the vocabulary.

Tokens that are certainly cut are dropped in float32. A token below the k-th largest logit of its part is not among the
k largest. For each power of two, the mass of all weights above it tells whether a nucleus ends there or later. The
other tokens become one list, by ascending id. One program makes the cuts in this list in float64. Then programs draw
from parts of the cut list.

Shape suffixes: B rows, J columns, K draft tokens, V vocabulary, C parts, N tokens of a part, P powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.triton.rng import exponential_of
from triforce.backends.cuda.triton.truncation import cut


@triton.jit
def peak_of(peaks, C, C2: tl.constexpr):
    """Return the largest of all parts' peaks; NaN if any peak is."""
    c_C = tl.arange(0, C2)
    peak_C = tl.load(peaks + c_C, mask=c_C < C, other=-float("inf"))
    return tl.where(tl.max((peak_C != peak_C).to(tl.int32), 0) > 0, float("nan"), tl.max(peak_C, 0))


@triton.jit(do_not_specialize=["J", "C"])
def race_parts(places, ids, values, counts, divisors, seeds, choices, bests, winners, J, C, N: tl.constexpr):
    """Find the token of a part with the largest probability / exponential, the lowest id among equals."""
    c = tl.program_id(0)
    j = tl.program_id(1)
    b = tl.program_id(2)
    cell = (b * J + j).to(tl.int64)
    lane_N = tl.arange(0, N)
    count = tl.load(counts + cell) - c * N
    best = tl.full([], 0.0, tl.float64)
    winner = tl.full([], 0, tl.int32)
    if count > 0:
        at_N = (cell * C + c) * N + lane_N
        real_N = lane_N < count
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
    """Store the winner of all parts, the lowest id among equals, and the column's peak."""
    cell = tl.program_id(1) * J + tl.program_id(0)
    c_C = tl.arange(0, C2)
    best_C = tl.load(bests + cell * C + c_C, mask=c_C < C, other=0.0)
    best = tl.max(best_C, 0)
    winner_C = tl.load(winners + cell * C + c_C, mask=(c_C < C) & (best_C == best), other=0x7FFFFFFF)
    winner = tl.min(winner_C, 0)
    tl.store(out + cell, tl.where(best > 0, winner, 0).to(tl.int64))
    tl.store(out + B * J + cell, peak_of(peaks + cell * C, C, C2).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["B", "J", "C", "draft_row_stride", "draft_stride"])
def share_parts(
    places, ids, values, counts, divisors, draft_probs, probs, sums, B, J, V, C, draft_row_stride, draft_stride,
    N: tl.constexpr,
):  # fmt: skip
    """Store a part's probabilities p in `probs` and in its list; store its sums of max(p - q, 0) and of p.

    q: the draft's probabilities.
    """
    c = tl.program_id(0)
    j = tl.program_id(1)
    b = tl.program_id(2)
    cell = (b * J + j).to(tl.int64)
    lane_N = tl.arange(0, N)
    count = tl.load(counts + cell) - c * N
    residual = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    if count > 0:
        at_N = (cell * C + c) * N + lane_N
        real_N = lane_N < count
        id_N = tl.load(ids + at_N, mask=real_N, other=0)
        p_N = tl.load(values + at_N, mask=real_N, other=0.0) / tl.load(divisors + cell)
        tl.store(values + at_N, p_N, mask=real_N)
        tl.store(probs + cell * V + id_N, p_N, mask=real_N)
        draft_probs += b.to(tl.int64) * draft_row_stride + j.to(tl.int64) * draft_stride
        q_N = tl.load(draft_probs + id_N, mask=real_N & (j < tl.load(places + B + b)), other=0.0)
        residual = tl.sum(tl.maximum(p_N - q_N, 0.0), 0)
        mass = tl.sum(p_N, 0)
    tl.store(sums + cell * C + c, residual)
    tl.store(sums + (B * J + cell) * C + c, mass)


@triton.jit(do_not_specialize=["B", "J", "C", "draft_row_stride", "draft_stride"])
def judge_parts(
    places, peaks, ids, values, counts, sums, tokens, uniforms, draft_probs, probs, out, B, J, V, C, draft_row_stride,
    draft_stride, N: tl.constexpr, C2: tl.constexpr,
):  # fmt: skip
    """Store one column's verdict: accept the draft token, or draw the token that replaces it."""
    j = tl.program_id(0)
    b = tl.program_id(1)
    cell = (b * J + j).to(tl.int64)
    last_column = tl.load(places + B + b)
    verdict = tl.full([], 0, tl.int32)
    peak = peak_of(peaks + cell * C, C, C2)
    if (j <= last_column) & (tl.abs(peak) < float("inf")):
        draft_probs += b.to(tl.int64) * draft_row_stride + j.to(tl.int64) * draft_stride
        token = tl.load(tokens + b * (J - 1) + j, mask=j < last_column, other=0)
        p = tl.load(probs + cell * V + token)
        q = tl.load(draft_probs + token, mask=j < last_column, other=0.0)
        uniform = tl.load(uniforms + b * J + 1 + j, mask=j < last_column, other=0.0)
        if (j < last_column) & (uniform * q < p):
            verdict = tl.full([], -1, tl.int32)
        else:
            ids = ids + cell * C * N
            values = values + cell * C * N
            sums = sums + cell * C
            count = tl.load(counts + cell)
            uniform = tl.load(uniforms + b * J)
            verdict = _draw(ids, values, count, sums, draft_probs, j < last_column, uniform, B * J * C, C, N, C2)
    tl.store(out + cell, verdict.to(tl.int64))
    tl.store(out + B * J + cell, peak.to(tl.int64, bitcast=True))


@triton.jit
def _draw(ids, values, count, sums, draft_probs, rejected, uniform, sums_stride, C, N: tl.constexpr, C2: tl.constexpr):
    """Draw a token from max(p - q, 0) by inversion: first its part, then the token.

    Without a rejection, or if max(p - q, 0) is zero, the token is drawn from p. Rounding may make a prefix sum smaller
    than the one before it, so parts and tokens of mass 0 are skipped. If no prefix sum passes the end, the last part or
    token with mass is drawn. In `sums`, the sums of p begin `sums_stride` entries after the sums of max(p - q, 0).
    """
    c_C = tl.arange(0, C2)
    lane_N = tl.arange(0, N)
    mass_C = tl.load(sums + c_C, mask=c_C < C, other=0.0)
    if rejected & (tl.sum(mass_C, 0) == 0):  # p == q up to rounding
        rejected = tl.full([], False, tl.int1)
        mass_C = tl.load(sums + sums_stride + c_C, mask=c_C < C, other=0.0)
    upto_C = tl.cumsum(mass_C, 0)
    total = tl.sum(tl.where(c_C == C - 1, upto_C, 0.0), 0)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # uniform * total may round up to total
    end = tl.minimum(uniform * total, below)
    c = tl.min(tl.where((mass_C > 0) & (upto_C > end), c_C, 0x7FFFFFFF), 0)
    c = tl.where(c == 0x7FFFFFFF, tl.max(tl.where(mass_C > 0, c_C, 0), 0), c)
    earlier_mass = tl.sum(tl.where(c_C == c - 1, upto_C, 0.0), 0)
    real_N = c * N + lane_N < count
    id_N = tl.load(ids + c * N + lane_N, mask=real_N, other=0)
    p_N = tl.load(values + c * N + lane_N, mask=real_N, other=0.0)
    residual_N = tl.maximum(p_N - tl.load(draft_probs + id_N, mask=real_N & rejected, other=0.0), 0.0)
    passes_N = (residual_N > 0) & (earlier_mass + tl.cumsum(residual_N, 0) > end)
    token = tl.min(tl.where(passes_N, id_N, 0x7FFFFFFF), 0)
    return tl.where(token == 0x7FFFFFFF, tl.max(tl.where(residual_N > 0, id_N, 0), 0), token)


POWERS = 32
"""Number of powers of two whose masses are stored.

If a nucleus reaches below 2 ** -32 times the largest weight, no token is dropped in advance.
"""


def decide(
    column_inputs: tuple[Tensor, Tensor, Tensor],
    draws: tuple[Tensor, Tensor],
    probs: tuple[Tensor, Tensor],
    race: bool,
    N: int,
) -> Tensor:
    """Return verdicts and peaks, int64 (2, B, J), as `sampler.by_race` or `sampler.by_rejection` does; write `probs`.

    column_inputs: logits, settings and places of `SamplerInputs`. draws: seeds and choices (B) of a race, else draft
    tokens (B, K) and uniforms (B, J). probs: probabilities of the draft, and room for the target's. N: a power of two.
    """
    logits_BJV, settings_5B, places_2B = column_inputs
    seeds_or_tokens, choices_or_uniforms = draws
    draft_probs_BKV, probs_BJV = probs
    B, J, V = logits_BJV.shape
    P = POWERS
    float64 = torch.float64
    int32 = torch.int32
    C = triton.cdiv(V, N)
    C2 = triton.next_power_of_2(C)
    parts = (C, J, B)
    columns = (J, B)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_BJV.device)

    peaks_BJC = new(B, J, C, dtype=float64)
    sums_2BJC = new(2, B, J, C, dtype=float64)
    masses_BJCP = new(B, J, C, P, dtype=torch.float32)
    counts_BJCP = new(B, J, C, P + 1, dtype=int32)
    lists, joined = ((new(B, J, C * N, dtype=int32), new(B, J, C * N, dtype=float64)) for _ in range(2))
    counts_BJ = new(B, J, dtype=int32)
    divisors_BJ = new(B, J, dtype=float64)
    winners_BJC = new(B, J, C, dtype=int32)
    out_2BJ = new(2, B, J, dtype=torch.int64)
    strides = logits_BJV.stride()[:2]
    draft_strides = draft_probs_BKV.stride()[:2]
    _peaks[parts](logits_BJV, peaks_BJC, J, V, C, *strides, N, num_warps=4)
    _shortlist[parts](
        logits_BJV, settings_5B, places_2B, peaks_BJC, *lists, counts_BJCP, masses_BJCP, sums_2BJC, B, J, V, C,
        *strides, N, C2, P, num_warps=4,
    )  # fmt: skip
    _join[parts](
        settings_5B, *lists, counts_BJCP, masses_BJCP, sums_2BJC, *joined, counts_BJ, B, J, C, N, C2, P, num_warps=4
    )  # fmt: skip
    _cut[columns](settings_5B, *joined, counts_BJ, sums_2BJC, divisors_BJ, B, J, C, N, C2, num_warps=16)
    if race:
        race_parts[parts](
            places_2B, *joined, counts_BJ, divisors_BJ, seeds_or_tokens, choices_or_uniforms, sums_2BJC, winners_BJC,
            J, C, N, num_warps=8,
        )  # fmt: skip
        close_race[columns](peaks_BJC, sums_2BJC, winners_BJC, out_2BJ, B, J, C, C2, num_warps=1)
    else:
        share_parts[parts](
            places_2B, *joined, counts_BJ, divisors_BJ, draft_probs_BKV, probs_BJV, sums_2BJC, B, J, V, C,
            *draft_strides, N, num_warps=8,
        )  # fmt: skip
        judge_parts[columns](
            places_2B, peaks_BJC, *joined, counts_BJ, sums_2BJC, seeds_or_tokens, choices_or_uniforms, draft_probs_BKV,
            probs_BJV, out_2BJ, B, J, V, C, *draft_strides, N, C2, num_warps=8,
        )  # fmt: skip
    return out_2BJ


@triton.jit(do_not_specialize=["J", "C"])
def _peaks(logits, peaks, J, V, C, row_stride, column_stride, N: tl.constexpr):
    """Store the largest logit of a part; NaN if any logit is."""
    c = tl.program_id(0)
    j = tl.program_id(1)
    b = tl.program_id(2)
    at_N = c * N + tl.arange(0, N)
    logits += b.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride
    x_N = tl.load(logits + at_N, mask=at_N < V, other=-float("inf"))
    has_nan = tl.max((x_N != x_N).to(tl.int32), 0) > 0
    peak = tl.where(has_nan, float("nan"), tl.max(x_N, 0).to(tl.float64))
    tl.store(peaks + (b * J + j) * C + c, peak)


@triton.jit(do_not_specialize=["B", "J", "C"])
def _shortlist(
    logits, settings, places, peaks, ids, values, counts, masses, sums, B, J, V, C, row_stride, column_stride,
    N: tl.constexpr, C2: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """List the tokens of a part that may stay after all cuts: their scores if there is a top-k, else their weights.

    Store the list's count and the part's total. The list is empty for a column without a distribution, or after a row's
    last column.
    """
    c = tl.program_id(0)
    j = tl.program_id(1)
    b = tl.program_id(2)
    cell = (b * J + j).to(tl.int64)
    at = cell * C + c
    peak = peak_of(peaks + cell * C, C, C2)
    part_peak = tl.load(peaks + at)
    temperature = tl.load(settings + b)
    k = tl.load(settings + B + b).to(tl.int32)
    min_score = tl.load(settings + 3 * B + b)
    light = tl.load(settings + 4 * B + b)
    min_score = tl.where(k == 1, tl.maximum(min_score, 0.0), min_score)
    value_N = tl.full([N], 0.0, tl.float64)
    stays_N = tl.full([N], False, tl.int1)
    total = tl.full([], 0.0, tl.float64)
    id_N = c * N + tl.arange(0, N)
    if (j <= tl.load(places + B + b)) & (tl.abs(peak) < float("inf")):  # noqa: SIM102
        if (part_peak - peak) / temperature >= min_score:
            logits += b.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride
            x_N = tl.load(logits + id_N, mask=id_N < V, other=-float("inf"))
            value_N = (x_N.to(tl.float64) - peak) / temperature  # in this order: a tiny temperature cannot overflow
            stays_N = (value_N >= min_score) & (value_N > -float("inf"))
            if k > 1:
                stays_N = stays_N & _kept_by_top_k(x_N, k)
            if k == 0:
                value_N = tl.where(stays_N, tl.exp(value_N), 0.0)
                total = tl.sum(value_N, 0)
                stays_N = (value_N > 0) & (value_N >= light)
    at_N = at * N + tl.cumsum(stays_N.to(tl.int32), 0) - 1
    tl.store(ids + at_N, id_N, mask=stays_N)
    tl.store(values + at_N, value_N, mask=stays_N)
    tl.store(sums + at, total)
    tl.store(counts + at * (P + 1) + P, tl.sum(stays_N.to(tl.int32), 0))
    if (k == 0) & (tl.load(settings + 2 * B + b) < 1):
        weight_N = tl.where(stays_N, value_N, 0.0).to(tl.float32)
        for p in range(P):
            heavy_N = weight_N >= _power(p)
            tl.store(masses + at * P + p, tl.sum(tl.where(heavy_N, weight_N, 0.0), 0))
            tl.store(counts + at * (P + 1) + p, tl.sum(heavy_N.to(tl.int32), 0))


@triton.jit
def _power(p):
    """Return 2 ** -(p + 1), a float32."""
    return ((tl.full([], 126, tl.int32) - p) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _kept_by_top_k(x_N, k):
    """Return a mask of the k largest of a part, and of all tokens that equal them in float32."""
    bits_N = (x_N.to(tl.float32) + 0.0).to(tl.uint32, bitcast=True)  # so that -0.0 equals 0.0
    order_N = tl.where(bits_N >> 31 == 1, bits_N ^ 0xFFFFFFFF, bits_N | 0x80000000).to(tl.uint32)
    threshold = tl.full([], 0, tl.uint32)
    for bit in range(32):
        higher = threshold | (tl.full([], 0x80000000, tl.uint32) >> bit)
        threshold = tl.where(tl.sum((order_N >= higher).to(tl.int32), 0) >= k, higher, threshold)
    return order_N >= threshold


@triton.jit(do_not_specialize=["B", "J", "C"])
def _join(
    settings, ids, values, counts, masses, sums, joined_ids, joined_values, joined_counts, B, J, C, N: tl.constexpr,
    C2: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Append this part's list to the list of all parts, without tokens that are certainly outside the nucleus."""
    c = tl.program_id(0)
    j = tl.program_id(1)
    b = tl.program_id(2)
    cell = (b * J + j).to(tl.int64)
    c_C = tl.arange(0, C2)
    p_P = tl.arange(0, P)
    lane_N = tl.arange(0, N)
    at_C = cell * C + c_C
    p = tl.full([], P, tl.int32)
    min_weight = tl.full([], -float("inf"), tl.float32)
    mass = tl.load(settings + 2 * B + b)
    if (tl.load(settings + B + b) == 0) & (mass < 1):
        total = tl.sum(tl.load(sums + at_C, mask=c_C < C, other=0.0), 0)
        mass_CP = tl.load(masses + at_C[:, None] * P + p_P[None, :], mask=(c_C < C)[:, None], other=0.0)
        enough_P = tl.sum(mass_CP, 0) >= (mass * total * 1.0001).to(tl.float32)  # the error of float32 sums is smaller
        p = tl.min(tl.where(enough_P, p_P, P), 0)
        min_weight = tl.where(p < P, _power(p), min_weight)
    kept_C = tl.load(counts + at_C * (P + 1) + p, mask=c_C < C, other=0)
    earlier_count = tl.sum(tl.where(c_C < c, kept_C, 0), 0)
    real_N = lane_N < tl.load(counts + (cell * C + c) * (P + 1) + P)
    id_N = tl.load(ids + (cell * C + c) * N + lane_N, mask=real_N, other=0)
    value_N = tl.load(values + (cell * C + c) * N + lane_N, mask=real_N, other=0.0)
    stays_N = real_N & (value_N.to(tl.float32) >= min_weight)
    at_N = cell * C * N + earlier_count + tl.cumsum(stays_N.to(tl.int32), 0) - 1
    tl.store(joined_ids + at_N, id_N, mask=stays_N)
    tl.store(joined_values + at_N, value_N, mask=stays_N)
    tl.store(joined_counts + cell, tl.sum(kept_C, 0), mask=c == 0)


@triton.jit(do_not_specialize=["B", "J", "C"])
def _cut(settings, ids, values, counts, sums, divisors, B, J, C, N: tl.constexpr, C2: tl.constexpr):
    """Cut one column's list by top-k and top-p, and store the divisor of its values."""
    j = tl.program_id(0)
    b = tl.program_id(1)
    cell = (b * J + j).to(tl.int64)
    c_C = tl.arange(0, C2)
    k = tl.load(settings + B + b).to(tl.int32)
    mass = tl.load(settings + 2 * B + b)
    count = tl.load(counts + cell)
    light = tl.load(settings + 4 * B + b)
    divisor = tl.sum(tl.load(sums + cell * C + c_C, mask=c_C < C, other=0.0), 0)
    if ((k > 0) | (mass < 1)) & (count > 0):
        count, divisor = cut(ids + cell * C * N, values + cell * C * N, count, divisor, k, mass, light, N)
        tl.store(counts + cell, count)
    tl.store(divisors + cell, divisor)
