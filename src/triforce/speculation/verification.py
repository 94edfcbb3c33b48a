"""Verification: accepts or rejects draft tokens, and draws a token after them. This is the reference implementation.

It runs where torch computes on a CPU, and for `block` on a GPU. `backends/token_sampler.py` chooses the code that runs:
`csrc/sampler.cpp` on a CPU (`verify_seeded` for the default coupling), `backends/cuda/sampler.py` on a GPU.
`rejection`, `block` and `seeded` are pure functions of a draft, the verifier's probabilities and noise: numpy arrays or
tensors, by the array API standard. `Rejection`, `BlockRejection` and `Seeded` bind them to a source of noise.
Shape suffixes: B rows, K draft tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import numpy as np

from triforce.arrays import Array, namespace, on_device_of, to_host
from triforce.ragged import Bools, Ints, columns, rows
from triforce.speculation.draft import Draft


def rejection(draft: Draft, probs_BJV: Array, uniforms_BJ: Array) -> tuple[Array, Array]:
    """Return the number of accepted draft tokens (B,), and the token drawn after them (B,).

    Leviathan et al. 2023, Algorithm 1: a token x ~ q is accepted with probability min(1, p(x) / q(x)); at the first
    rejection the token is drawn from the residual norm(max(p - q, 0)), and where nothing was rejected (q = 0) from p
    itself: the bonus token. The first uniform of a row is for the draw, the next ones are for its draft tokens. A row
    uses its first `counts_B + 1` uniforms, and leaves the others for its next verification.
    """
    K = draft.tokens_BK.shape[1]
    draft_probs_BJV = _drafted(draft, probs_BJV)
    p_BK = _of_tokens(draft, probs_BJV[:, :K])
    q_BK = _of_tokens(draft, draft_probs_BJV[:, :K])
    accepted_B = _leading(draft, uniforms_BJ[:, 1:] * q_BK < p_BK)
    p_BV = _at(probs_BJV, accepted_B)
    return accepted_B, draw(_residual(p_BV - _at(draft_probs_BJV, accepted_B), p_BV), uniforms_BJ[:, 0])


def block(draft: Draft, probs_BJV: Array, uniforms_BJ: Array) -> tuple[Array, Array]:
    """Return the same as `rejection`, by rejection of the draft as a block: on average it accepts no fewer tokens.

    Sun et al. 2024, arXiv 2403.10444, Algorithm 2. reach_j = min(1, reach_(j-1) p(x_j) / q(x_j)), with reach_0 = 1, is
    the probability that at least j draft tokens are accepted. For exactness, the probability that they are accepted and
    token x follows must be p(x) reach_j (equation 3). Place j is the place after j draft tokens. If the row goes on
    there, the next draft token is x with probability at most q(x). If the row ends there, it draws x, and this must
    contribute the rest of the probability: residual_j(x) = max(p(x) reach_j - q(x), 0). A row ends at the last place
    that passes. Given that no later place passes, place j passes with
    probability sum residual_j / (sum residual_j + 1 - reach_j) (equation 4). After the last draft token q = 0, and this
    probability is reach_j. The uniforms are those of `rejection`.
    """
    xp = namespace(probs_BJV)
    B, K = draft.tokens_BK.shape
    draft_probs_BJV = _drafted(draft, probs_BJV)
    real_BK = _real(draft, probs_BJV)
    # A ratio of padding is never used: 1 in its place avoids a division by zero.
    q_BK = xp.where(real_BK, _of_tokens(draft, draft_probs_BJV[:, :K]), 1.0)
    ratios_BK = _of_tokens(draft, probs_BJV[:, :K]) / q_BK
    one_B = xp.ones(B, dtype=probs_BJV.dtype, device=probs_BJV.device)
    ratios = [ratios_BK[:, k] for k in range(K)]
    reach_BJ = xp.stack([*accumulate(ratios, lambda a, b: xp.minimum(a * b, one_B), initial=one_B)], axis=1)
    residual_BJV = _positive(reach_BJ[..., None] * probs_BJV - draft_probs_BJV)
    residual_BJ = xp.sum(residual_BJV, axis=2)
    ends_BJ = on_device_of(np.arange(K + 1) * (np.arange(K + 1) <= draft.counts_B[:, None]), probs_BJV)
    passes_BJ = uniforms_BJ * (residual_BJ + (1 - reach_BJ)) < residual_BJ
    accepted_B = xp.max(xp.where(passes_BJ, ends_BJ, 0), axis=1)
    return accepted_B, draw(_residual(_at(residual_BJV, accepted_B), _at(probs_BJV, accepted_B)), uniforms_BJ[:, 0])


def seeded(draft: Draft, probs_BJV: Array, exponentials_BJV: Array) -> tuple[Array, Array]:
    """Return the number of leading draft tokens that equal this tier's picks (B,), and its pick after them (B,).

    Daliri, Musco and Suresh 2024: the pick of a position is argmin(E / p) with standard exponentials E, which is the
    Gumbel-max sample of p. All tiers share the E of a position, so the picks of a text do not depend on the draft.
    """
    picks_BJ = race(probs_BJV, exponentials_BJV)
    accepted_B = _leading(draft, on_device_of(draft.tokens_BK, picks_BJ) == picks_BJ[:, :-1])
    return accepted_B, _at(picks_BJ, accepted_B)


def race(probs_BJV: Array, exponentials_BJV: Array) -> Array:
    """Winner (B, J) of an exponential race with rates `probs_BJV`: a sample of them, the lowest id among equals."""
    return namespace(probs_BJV).argmax(probs_BJV / exponentials_BJV, axis=-1)


def draw(weights_BV: Array, uniforms_B: Array) -> Array:
    """Draw one token a row (B,), in proportion to float64 weights, by inversion. Never one of weight zero."""
    xp = namespace(weights_BV)
    cdf_BV = xp.cumulative_sum(weights_BV, axis=1)
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = xp.nextafter(total_B1, xp.zeros_like(total_B1))  # u * total may round up to total
    at_B1 = xp.minimum(uniforms_B[:, None] * total_B1, below_total_B1)
    return xp.sum(xp.astype(cdf_BV <= at_B1, xp.int64), axis=1)


def _leading(draft: Draft, fits_BK: Array) -> Array:
    """Number of draft tokens of each row before the first that does not fit: (B,)."""
    xp = namespace(fits_BK)
    fitting_BK = xp.astype(fits_BK & _real(draft, fits_BK), xp.int64)
    return xp.sum(xp.cumulative_prod(fitting_BK, axis=1), axis=1)


def _real(draft: Draft, array: Array) -> Array:
    """Return a mask of the draft tokens that are no padding, (B, K), of the kind of `array`."""
    return on_device_of(np.arange(draft.tokens_BK.shape[1]) < draft.counts_B[:, None], array)


def _drafted(draft: Draft, probs_BJV: Array) -> Array:
    """Return the draft's probabilities of each column, zeros after a row's draft tokens: (B, J, V)."""
    xp = namespace(probs_BJV)
    own_BKV = on_device_of(draft.probs_BKV, probs_BJV) * _real(draft, probs_BJV)[..., None]
    return xp.concat([own_BKV, xp.zeros_like(probs_BJV[:, :1])], axis=1)


def _of_tokens(draft: Draft, probs_BKV: Array) -> Array:
    """Return the probability of each draft token, (B, K)."""
    tokens_BK = on_device_of(draft.tokens_BK, probs_BKV)
    return namespace(probs_BKV).take_along_axis(probs_BKV, tokens_BK[..., None], axis=2)[..., 0]


def _at(x_BJ: Array, column_B: Array) -> Array:
    """Return each row's values at its column: (B, ...)."""
    return x_BJ[namespace(x_BJ).arange(len(x_BJ), device=x_BJ.device), column_B]


def _positive(x: Array) -> Array:
    xp = namespace(x)
    return xp.maximum(x, xp.zeros_like(x))


def _residual(difference_BV: Array, p_BV: Array) -> Array:
    """Return the positive part of a difference; p where that is zero, as p == q up to rounding: (B, V)."""
    xp = namespace(p_BV)
    residual_BV = _positive(difference_BV)
    return xp.where(xp.sum(residual_BV, axis=1, keepdims=True) > 0, residual_BV, p_BV)


class NoiseSource(Protocol):
    """Counter-based noise of the rows of a batch; see `triforce.backends.torch.noise`.

    `draws` (int64, tiers x B) counts the uniforms that each row has used.
    """

    draws: Array

    def exponentials(self, positions_BJ: Array, vocab_size: int) -> Array: ...

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Array: ...


class Verification(Protocol):
    """Turns a draft of any distribution into a draft that is a sample of `probs_BJV`."""

    def probs_size(self, vocab_size: int) -> int:
        """Number of probabilities of each token that a draft must carry so that the tier above can verify it."""

    def verify(self, draft: Draft, probs_BJV: Array, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        """Return the accepted draft tokens and one more, samples of `probs_BJV`. lengths_B: tokens of the texts."""


class Rejection:
    """Rejection sampling. Highest acceptance of one token, 1 - TV(p, q); exact in distribution."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def probs_size(self, vocab_size: int) -> int:
        return vocab_size

    def verify(self, draft: Draft, probs_BJV: Array, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        uniforms_BJ = self.noise.uniforms(tier, probs_BJV.shape[1], (draft.counts_B + 1) * live_B)
        return accepted_draft(draft, *rejection(draft, probs_BJV, uniforms_BJ), probs_BJV, tier)


class BlockRejection(Rejection):
    """Rejection of blocks. Accepts more than `Rejection` where drafts are long; exact in distribution."""

    def verify(self, draft: Draft, probs_BJV: Array, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        uniforms_BJ = self.noise.uniforms(tier, probs_BJV.shape[1], (draft.counts_B + 1) * live_B)
        return accepted_draft(draft, *block(draft, probs_BJV, uniforms_BJ), probs_BJV, tier)


class Seeded:
    """Verification by shared noise. With a fixed seed the text is that of plain decoding, for all tiers and batches."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def probs_size(self, vocab_size: int) -> int:
        return 0

    def verify(self, draft: Draft, probs_BJV: Array, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        positions_BJ = columns(lengths_B, probs_BJV.shape[1])
        exponentials_BJV = self.noise.exponentials(positions_BJ, probs_BJV.shape[2])
        return accepted_draft(draft, *seeded(draft, probs_BJV, exponentials_BJV), probs_BJV[..., :0], tier)


def accepted_draft(draft: Draft, accepted_B: Array, tokens_B: Array, probs_BJV: Array, tier: int) -> Draft:
    """Return the accepted tokens and the drawn one, as a draft of the verifier. The host waits for the device here."""
    decided_2B = to_host(namespace(probs_BJV).stack([accepted_B, tokens_B]))
    return accepted_on_host(draft, decided_2B, probs_BJV, tier)


def accepted_on_host(draft: Draft, decided_2B: Ints, probs_BJV: Array, tier: int) -> Draft:
    """Return the result of `accepted_draft`. decided_2B: numbers of accepted tokens, and the drawn tokens."""
    accepted_B1, drawn_B1 = decided_2B[..., None]
    none_B1 = np.zeros_like(accepted_B1)
    tokens_BJ, origins_BJ = (
        np.concatenate((values_BK, none_B1), 1) for values_BK in (draft.tokens_BK, draft.origins_BK)
    )
    tokens_BJ[rows(len(accepted_B1)), accepted_B1] = drawn_B1
    origins_BJ[rows(len(accepted_B1)), accepted_B1] = tier
    return Draft(tokens_BJ, probs_BJV, origins_BJ, accepted_B1[:, 0] + 1)
