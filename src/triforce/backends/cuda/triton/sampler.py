"""Sampling from logits to verdicts: a column's distribution accepts or replaces a draft token.

A large vocabulary has several programs per column (`column_parts`); other vocabularies have one program per column and
one launch in all (this module).

A program goes through its column in blocks. Tokens of nonzero probability are a list in memory, by ascending id, and
each cut shortens it; so only the first passes read the whole vocabulary, and nothing is sorted (see `truncation`). All
numbers are float64.

Shape suffixes: B rows, J columns, K draft tokens, V vocabulary, N tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.triton import column_parts, interpreted
from triforce.backends.cuda.triton.rng import exponential_of
from triforce.backends.cuda.triton.truncation import distribution, widest

ACCEPTED = -1
"""Verdict that accepts a draft token."""
BLOCK = 2048
BLOCK_INTERPRETED = 256
"""Tokens of a block; few in tests, so that small vocabularies have several blocks."""
SINGLE_PROGRAM = 16_384
SINGLE_PROGRAM_INTERPRETED = 256
"""Largest vocabulary for which one program takes a column, in one launch. Above it six launches take less time."""
PART = 2048
PART_INTERPRETED = 256
"""Tokens of a part of a column that several programs share."""


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """Inputs of verification."""

    logits_BJV: Tensor
    """Logits of any type."""
    settings_5B: Tensor
    """Per row: temperature, top-k, top-p, least score and lightest share, float64 (see `cuda.sampler._settings`)."""
    places_2B: Tensor
    """Per row: length of the text, and index of the last column with a draft token or a draw (-1: no column)."""


def by_race(inputs: SamplerInputs, seeds_B: Tensor, choices_B: Tensor) -> Tensor:
    """Return each column's token by an exponential race, and its peak: int64 (2, B, J).

    The token has the largest probability / exponential, with the exponentials of `rng.exponentials`. A peak is the
    largest logit of a column, as the bits of a float64; NaN if any logit is. A column without a finite peak has no
    distribution. In such a column, and after a row's last column, the token is undefined.
    """
    return _launch(inputs, True, seeds_B, choices_B, inputs.logits_BJV, inputs.logits_BJV)


def by_rejection(
    inputs: SamplerInputs, tokens_BK: Tensor, draft_probs_BKV: Tensor, uniforms_BJ: Tensor
) -> tuple[Tensor, Tensor]:
    """Return verdicts and peaks as `by_race` does, and the distributions (B, J, V): zeros for columns without one.

    A verdict is ACCEPTED, or the token that ends the row if its earlier draft tokens were accepted. Uniforms are those
    of `speculation.verification.rejection`.
    """
    probs_BJV = torch.zeros(inputs.logits_BJV.shape, dtype=torch.float64, device=inputs.logits_BJV.device)
    return _launch(inputs, False, tokens_BK, uniforms_BJ, draft_probs_BKV, probs_BJV), probs_BJV


def _launch(
    inputs: SamplerInputs,
    race: bool,
    seeds_or_tokens: Tensor,
    choices_or_uniforms: Tensor,
    draft_probs_BKV: Tensor,
    probs_BJV: Tensor,
) -> Tensor:
    B, J, V = inputs.logits_BJV.shape
    new = inputs.logits_BJV.new_empty
    single_program_size, part = (
        (SINGLE_PROGRAM_INTERPRETED, PART_INTERPRETED) if interpreted() else (SINGLE_PROGRAM, PART)
    )
    if single_program_size < V:
        column_inputs = inputs.logits_BJV, inputs.settings_5B, inputs.places_2B
        return column_parts.decide(
            column_inputs, (seeds_or_tokens, choices_or_uniforms), (draft_probs_BKV, probs_BJV), race, part
        )
    ids_BJV = new(B, J, V, dtype=torch.int32)
    values_BJV = new(B, J, V, dtype=torch.float64)
    out_2BJ = new(2, B, J, dtype=torch.int64)
    strides = *inputs.logits_BJV.stride()[:2], *draft_probs_BKV.stride()[:2]
    _decide[(J, B)](
        inputs.logits_BJV, inputs.settings_5B, inputs.places_2B, seeds_or_tokens, choices_or_uniforms, draft_probs_BKV,
        probs_BJV, ids_BJV, values_BJV, out_2BJ, B, J, V, *strides, race, BLOCK_INTERPRETED if interpreted() else BLOCK,
        num_warps=16,
    )  # fmt: skip
    return out_2BJ


@triton.jit(do_not_specialize=["B", "J", "draft_row_stride", "draft_stride"])
def _decide(
    logits, settings, places, seeds_or_tokens, choices_or_uniforms, draft_probs, probs, ids, values, out, B, J, V,
    row_stride, column_stride, draft_row_stride, draft_stride, RACE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Decide one column of one row.

    `seeds_or_tokens`, `choices_or_uniforms`: seeds and choices (B) of a race, else draft tokens (B, K) and uniforms.
    """
    j = tl.program_id(0)
    b = tl.program_id(1)
    cell = (tl.program_id(1) * J + tl.program_id(0)).to(tl.int64)
    logits += b.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride
    ids = ids + cell * V
    values = values + cell * V
    low, peak = widest(logits, V, N)
    last_column = tl.load(places + B + b)
    verdict = tl.full([], 0, tl.int64)
    if (j <= last_column) & (tl.abs(peak) < float("inf")):
        count, total = distribution(logits, settings + b, ids, values, B, V, low, peak, N)
        if RACE:
            position = tl.load(places + b) + j
            verdict = _race(
                ids, values, count, tl.load(seeds_or_tokens + b), tl.load(choices_or_uniforms + b), position, N
            ).to(tl.int64)
        else:
            draft_probs += b.to(tl.int64) * draft_row_stride + j.to(tl.int64) * draft_stride
            verdict = _judge(
                ids, values, count, total, probs + cell * V, draft_probs, seeds_or_tokens + b * (J - 1) + j,
                choices_or_uniforms + b * J, j, last_column, N,
            ).to(tl.int64)  # fmt: skip
    tl.store(out + cell, verdict)
    tl.store(out + B * J + cell, peak.to(tl.int64, bitcast=True))


@triton.jit
def _race(ids, values, count, seed, choice, position, N: tl.constexpr):
    """Return the token with the largest value / exponential, the lowest id among equals."""
    best = tl.full([], 0.0, tl.float64)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        id_N = tl.load(ids + at_N, mask=at_N < count, other=0x7FFFFFFF)
        share_N = tl.load(values + at_N, mask=at_N < count, other=0.0)
        ratio_N = share_N / exponential_of(seed, choice, position, id_N)
        top = tl.max(ratio_N, 0)
        winner = tl.where(top > best, tl.min(tl.where(ratio_N == top, id_N, 0x7FFFFFFF), 0), winner)
        best = tl.maximum(best, top)
    return winner


@triton.jit
def _judge(ids, values, count, total, probs, draft_probs, draft_token, uniforms, j, last_column, N: tl.constexpr):
    """Write the probabilities, and accept the draft token or draw the token that replaces it."""
    for start in range(0, count, N):
        at_N = start + tl.arange(0, N)
        share_N = tl.load(values + at_N, mask=at_N < count, other=0.0) / total
        tl.store(values + at_N, share_N, mask=at_N < count)
        tl.store(probs + tl.load(ids + at_N, mask=at_N < count, other=0), share_N, mask=at_N < count)
    tl.debug_barrier()
    token = tl.load(draft_token, mask=j < last_column, other=0)
    p = tl.load(probs + token)
    q = tl.load(draft_probs + token, mask=j < last_column, other=0.0)
    uniform = tl.load(uniforms + 1 + j, mask=j < last_column, other=0.0)
    if (j < last_column) & (uniform * q < p):
        verdict = tl.full([], -1, tl.int32)
    else:
        verdict = _draw(ids, values, count, draft_probs, j < last_column, tl.load(uniforms), N)
    return verdict


@triton.jit
def _draw(ids, values, count, draft_probs, rejected, uniform, N: tl.constexpr):
    """Draw a token from max(p - q, 0) by inversion; from p without a rejection, or if max(p - q, 0) is zero."""
    total, _ = _walk(ids, values, count, draft_probs, rejected, float("inf"), N)
    if rejected & (total == 0):  # p == q up to rounding
        rejected = tl.full([], False, tl.int1)
        total, _ = _walk(ids, values, count, draft_probs, rejected, float("inf"), N)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # uniform * total may round up to total
    _, token = _walk(ids, values, count, draft_probs, rejected, tl.minimum(uniform * total, below), N)
    return token


@triton.jit
def _walk(ids, values, count, draft_probs, rejected, end, N: tl.constexpr):
    """Return the sum of all tokens' residuals, and the first token at which the running sum passes `end`.

    Rounding may make a prefix sum smaller than the one before it, so tokens without a residual are skipped. If no
    prefix sum passes `end`, the last token with a residual is returned.
    """
    total = tl.full([], 0.0, tl.float64)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    final = tl.full([], 0, tl.int32)
    lane_N = tl.arange(0, N)
    for start in range(0, count, N):
        real_N = start + lane_N < count
        id_N = tl.load(ids + start + lane_N, mask=real_N, other=0)
        p_N = tl.load(values + start + lane_N, mask=real_N, other=0.0)
        residual_N = tl.maximum(p_N - tl.load(draft_probs + id_N, mask=real_N & rejected, other=0.0), 0.0)
        sum_N = total + tl.cumsum(residual_N, 0)
        token = tl.minimum(token, tl.min(tl.where((residual_N > 0) & (sum_N > end), id_N, 0x7FFFFFFF), 0))
        final = tl.maximum(final, tl.max(tl.where(residual_N > 0, id_N, 0), 0))
        total = tl.sum(tl.where(lane_N == N - 1, sum_N, 0.0), 0)
    return total, tl.where(token == 0x7FFFFFFF, final, token)
