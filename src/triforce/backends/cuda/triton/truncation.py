"""Jitted parts of the sampler: from the logits of one column to its distribution, as `sampling.logits` defines it.

The tokens that truncation keeps are a list of ascending ids, with a value for each id. The edge of a cut is the
smallest value that stays. It is found by bisection of the range of values; among values equal to the edge the lowest
ids stay. Two passes over one list need a barrier between them, because a thread may read values that another thread has
written.

V vocabulary, N tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widest(logits, V, N: tl.constexpr):
    """Return the smallest and the largest logit; the largest is NaN if any logit is."""
    low_N = tl.full([N], float("inf"), logits.dtype.element_ty)
    high_N = -low_N
    nan_N = tl.full([N], 0, tl.int32)
    for start in range(0, V, N):
        at_N = start + tl.arange(0, N)
        low_N = tl.minimum(low_N, tl.load(logits + at_N, mask=at_N < V, other=float("inf")))
        x_N = tl.load(logits + at_N, mask=at_N < V, other=-float("inf"))
        high_N = tl.maximum(high_N, x_N)
        nan_N = nan_N | (x_N != x_N).to(tl.int32)
    high = tl.where(tl.max(nan_N, 0) > 0, float("nan"), tl.max(high_N, 0).to(tl.float64))
    return tl.min(low_N, 0).to(tl.float64), high


@triton.jit
def distribution(logits, settings, ids, values, B, V, low, peak, N: tl.constexpr):
    """Write the list of a distribution; return the count of its tokens, and the divisor of their values.

    Settings have a stride of B: temperature, top-k (0 is off), top-p, least score, lightest share (see
    `cuda.sampler._settings`).
    """
    temperature = tl.load(settings)
    k = tl.load(settings + B).to(tl.int32)
    mass = tl.load(settings + 2 * B)
    min_score = tl.load(settings + 3 * B)
    light = tl.load(settings + 4 * B)
    edge = tl.full([], -float("inf"), tl.float64)
    if k > 0:
        # Scores rise with logits, so the edge of scores and the edge of logits are at the same token.
        edge = (find_edge(logits, V, tl.where(k == 1, peak, low), peak, k, False, N) - peak) / temperature
    count = _scores(logits, ids, values, V, peak, temperature, tl.maximum(min_score, edge), N)
    count, total = _weights(ids, values, count, edge, k, light, N)
    return _top_p(ids, values, count, total, mass, light, N)


@triton.jit
def cut(ids, values, count, total, k, mass, light, N: tl.constexpr):
    """Cut a list by top-k and top-p; return the count of tokens left, and the divisor of their values.

    With a top-k the list has scores, whose largest is 0. Without a top-k it has weights, and `total` is the sum of all
    tokens' weights.
    """
    if k > 0:
        low = tl.full([], -float("inf"), tl.float64)
        edge = find_edge(values, count, low, tl.full([], 0.0, tl.float64), k, False, N)
        count, total = _weights(ids, values, count, edge, k, light, N)
    return _top_p(ids, values, count, total, mass, light, N)


@triton.jit
def _top_p(ids, values, count, total, mass, light, N: tl.constexpr):
    """Turn weights into shares and cut the list to its nucleus; return its count and the divisor of its shares."""
    total_share = _shares(values, count, total, N)
    divisor = tl.full([], 1.0, tl.float64)
    if (mass < 1) & (total_share >= mass):
        edge = find_edge(values, count, light, 1 / total, mass, True, N)
        count, divisor = _nucleus(ids, values, count, edge, mass, N)
    return count, divisor


@triton.jit
def find_edge(values, count, low, high, target, MASS: tl.constexpr, N: tl.constexpr):
    """Return the largest value v such that the values >= v reach `target`, by their count, or with MASS by their sum.

    v lies between `low` and `high`. The values >= `low` reach the target.
    """
    turn = tl.full([], 0, tl.int32)
    while low < high:
        pivot = _middle(low, high)
        if not MASS:  # a mean halves a difference, as of logits; a middle rank halves a ratio, as of shares
            mean = 0.5 * low + 0.5 * high
            pivot = tl.where((turn % 2 == 0) & (mean > low) & (mean <= high), mean, pivot)
        above, below, enough = _count_from(values, count, pivot, target, MASS, N)
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
        turn = turn + 1
    return low


@triton.jit
def _middle(low, high):
    """Return the float64 in the middle of all float64 numbers from `low` to `high`, by rank; it is above `low`."""
    low_bits = low.to(tl.int64, bitcast=True)
    high_bits = high.to(tl.int64, bitcast=True)
    low_rank = low_bits ^ ((low_bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    high_rank = high_bits ^ ((high_bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    rank = (low_rank & high_rank) + ((low_rank ^ high_rank) >> 1) + 1  # without overflow
    return (rank ^ ((rank >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def _count_from(values, count, pivot, target, MASS: tl.constexpr, N: tl.constexpr):
    """Return the least value >= pivot, the largest below it, and whether the values >= pivot reach `target`."""
    sum_N = tl.full([N], 0.0, tl.float64)
    above_N = tl.full([N], float("inf"), tl.float64)
    below_N = -above_N
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        value_N = tl.load(values + at_N, mask=at_N < count, other=-float("inf")).to(tl.float64)
        reaches_N = (value_N >= pivot) & (at_N < count)
        sum_N += tl.where(reaches_N, value_N if MASS else 1.0, 0.0)
        above_N = tl.minimum(above_N, tl.where(reaches_N, value_N, float("inf")))
        below_N = tl.maximum(below_N, tl.where(reaches_N, -float("inf"), value_N))
    return tl.min(above_N, 0), tl.max(below_N, 0), tl.sum(sum_N, 0) >= target


@triton.jit
def _scores(logits, ids, values, V, peak, temperature, min_score, N: tl.constexpr):
    """List the tokens with a score of at least `min_score`; return their count."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, V, N):
        id_N = start + tl.arange(0, N)
        x_N = tl.load(logits + id_N, mask=id_N < V, other=-float("inf")).to(tl.float64)
        score_N = (x_N - peak) / temperature  # in this order, so that a tiny temperature cannot overflow
        stays_N = (score_N >= min_score) & (score_N > -float("inf"))
        count = _append(ids, values, count, id_N, score_N, stays_N)
    tl.debug_barrier()
    return count


@triton.jit
def _weights(ids, values, count, edge, k, light, N: tl.constexpr):
    """Cut scores to the k largest and turn them into weights; drop weights below `light` from the list.

    Return the count of the list, and the sum of the weights with the dropped ones.
    """
    room = k
    level = tl.full([], 0, tl.int32)
    kept_count = tl.full([], 0, tl.int32)
    sum_N = tl.full([N], 0.0, tl.float64)
    if k > 0:
        for start in range(0, count, N):
            at_N = start + tl.arange(0, N)
            above_N = tl.load(values + at_N, mask=at_N < count, other=-float("inf")) > edge
            room -= tl.sum(above_N.to(tl.int32), 0)
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        id_N = tl.load(ids + at_N, mask=at_N < count, other=0)
        score_N = tl.load(values + at_N, mask=at_N < count, other=-float("inf"))
        stays_N, level = _cut_at_edge(score_N, at_N < count, edge, level, room)
        weight_N = tl.where(stays_N, tl.exp(score_N), 0.0)
        sum_N += weight_N
        kept_count = _append(ids, values, kept_count, id_N, weight_N, (weight_N > 0) & (weight_N >= light))
    tl.debug_barrier()
    return kept_count, tl.sum(sum_N, 0)


@triton.jit
def _shares(values, count, total, N: tl.constexpr):
    """Divide weights by `total`; return the sum of the shares."""
    sum_N = tl.full([N], 0.0, tl.float64)
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        share_N = tl.load(values + at_N, mask=at_N < count, other=0.0) / total
        tl.store(values + at_N, share_N, mask=at_N < count)
        sum_N += share_N
    tl.debug_barrier()
    return tl.sum(sum_N, 0)


@triton.jit
def _nucleus(ids, values, count, edge, mass, N: tl.constexpr):
    """Cut shares to their nucleus; return its count and sum.

    The nucleus has all shares above the edge, and as many equal to the edge as it needs to hold `mass`.
    """
    heavy_N = tl.full([N], 0.0, tl.float64)
    level_N = tl.full([N], 0, tl.int32)
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        share_N = tl.load(values + at_N, mask=at_N < count, other=0.0)
        heavy_N += tl.where(share_N > edge, share_N, 0.0)
        level_N += (share_N == edge).to(tl.int32)
    nucleus_mass = tl.sum(heavy_N, 0)
    room = tl.full([], 0, tl.int32)
    equals = tl.sum(level_N, 0)
    while (nucleus_mass < mass) & (room < equals):  # share by share, so that sums round as on the torch path
        nucleus_mass = nucleus_mass + edge
        room = room + 1
    kept_count = tl.full([], 0, tl.int32)
    level = tl.full([], 0, tl.int32)
    sum_N = tl.full([N], 0.0, tl.float64)
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        id_N = tl.load(ids + at_N, mask=at_N < count, other=0)
        share_N = tl.load(values + at_N, mask=at_N < count, other=0.0)
        stays_N, level = _cut_at_edge(share_N, at_N < count, edge, level, room)
        sum_N += tl.where(stays_N, share_N, 0.0)
        kept_count = _append(ids, values, kept_count, id_N, share_N, stays_N)
    tl.debug_barrier()
    return kept_count, tl.sum(sum_N, 0)


@triton.jit
def _cut_at_edge(value_N, real_N, edge, level, room):
    """Return a mask of the values that stay, and the count of values equal to the edge so far.

    Values above the edge stay, and the first `room` values equal to it.
    """
    equal_N = real_N & (value_N == edge)
    rank_N = level + tl.cumsum(equal_N.to(tl.int32), 0)
    return real_N & ((value_N > edge) | (equal_N & (rank_N <= room))), level + tl.sum(equal_N.to(tl.int32), 0)


@triton.jit
def _append(ids, values, count, id_N, value_N, stays_N):
    """Append tokens to a list with `count` tokens, which may be the list that they come from; return its new count."""
    at_N = count + tl.cumsum(stays_N.to(tl.int32), 0) - 1
    tl.debug_barrier()  # until all threads have read their part of this block
    tl.store(ids + at_N, id_N, mask=stays_N)
    tl.store(values + at_N, value_N, mask=stays_N)
    return count + tl.sum(stays_N.to(tl.int32), 0)
