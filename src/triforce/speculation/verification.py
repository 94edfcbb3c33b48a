"""Verification: accepts or rejects draft tokens, and draws a token after them. This is the reference implementation.

It runs without native kernels, and for `block`. `backends/token_sampler.py` chooses the code that runs:
`csrc/sampler.cpp` on a CPU (`verify_seeded` is the default), `backends/cuda/sampler.py` on a GPU.
`rejection`, `block` and `seeded` are pure functions of a draft, the verifier's probabilities and noise. `Rejection`,
`BlockRejection` and `Seeded` bind them to a source of noise.
Shape suffixes: B rows, K draft tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.ragged import Bools, Ints, columns, rows, to_device
from triforce.speculation.draft import Draft


def rejection(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of accepted draft tokens (B,), and the token drawn after them (B,).

    Leviathan et al. 2023, Algorithm 1: a token x ~ q is accepted with probability min(1, p(x) / q(x)); at the first
    rejection the token is drawn from the residual norm(max(p - q, 0)), and where nothing was rejected (q = 0) from p
    itself: the bonus token. The first uniform of a row is for the draw and the others for its draft tokens, so that a
    row with fewer draft tokens than its batch neighbours uses fewer uniforms.
    """
    (B, K), device = draft.tokens_BK.shape, probs_BJV.device
    rows_B = torch.arange(B, device=device)
    counts_B = to_device(draft.counts_B, device)
    draft_probs_BKV = draft.probs_BKV.to(device)
    tokens_BK1 = to_device(draft.tokens_BK, device)[..., None]
    p_BK = probs_BJV[:, :K].gather(2, tokens_BK1).squeeze(2)
    q_BK = draft_probs_BKV.gather(2, tokens_BK1).squeeze(2)
    accepted_B = _leading(draft, uniforms_BJ[:, 1:] * q_BK < p_BK)
    p_BV = probs_BJV[rows_B, accepted_B]
    rejected_B = accepted_B < counts_B
    q_BV = F.pad(draft_probs_BKV, (0, 0, 0, 1))[rows_B, accepted_B] * rejected_B[:, None]
    residual_BV = (p_BV - q_BV).clamp_min(0)
    residual_BV = torch.where(residual_BV.sum(1, keepdim=True) > 0, residual_BV, p_BV)  # p == q up to rounding
    return accepted_B, draw(residual_BV, uniforms_BJ[:, 0])


def block(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `rejection`, by rejection of the draft as a block: it accepts at least as many tokens.

    Sun et al. 2024, arXiv 2403.10444, Algorithm 2. reach_j = min(1, reach_(j-1) p(x_j) / q(x_j)), from reach_0 = 1, is
    the chance that at least j tokens are accepted, and p(x) reach_j of it is due to each token x behind them (equation
    3). The draft token behind gives q(x) of that at most, so residual_j(x) = max(p(x) reach_j - q(x), 0) must come from
    ending at j. A row ends at j unless a later place passes; given that none does, j passes with probability sum
    residual_j / (sum residual_j + 1 - reach_j) (equation 4). Behind the last draft token q = 0, and that is reach_j.
    The uniforms are those of `rejection`.
    """
    (B, K), device = draft.tokens_BK.shape, probs_BJV.device
    rows_B = torch.arange(B, device=device)
    counts_B = to_device(draft.counts_B, device)
    columns_J = torch.arange(K + 1, device=device)
    tokens_BK1 = to_device(draft.tokens_BK, device)[..., None]
    draft_probs_BJV = F.pad(draft.probs_BKV.to(device), (0, 0, 0, 1)) * (columns_J < counts_B[:, None])[..., None]
    ratios_BK = (probs_BJV[:, :K].gather(2, tokens_BK1) / draft_probs_BJV[:, :K].gather(2, tokens_BK1)).squeeze(2)
    one_B = torch.ones(B, dtype=probs_BJV.dtype, device=device)
    reach_BJ = torch.stack([*accumulate(ratios_BK.unbind(1), lambda a, b: (a * b).clamp_max(1), initial=one_B)], 1)
    residual_BJV = (reach_BJ[..., None] * probs_BJV - draft_probs_BJV).clamp_min(0)
    residual_BJ = residual_BJV.sum(2)
    passes_BJ = (uniforms_BJ * (residual_BJ + (1 - reach_BJ)) < residual_BJ) & (columns_J <= counts_B[:, None])
    accepted_B = (passes_BJ * columns_J).amax(1)
    residual_BV = residual_BJV[rows_B, accepted_B]
    p_BV = probs_BJV[rows_B, accepted_B]
    residual_BV = torch.where(residual_BV.sum(1, keepdim=True) > 0, residual_BV, p_BV)  # p == q up to rounding
    return accepted_B, draw(residual_BV, uniforms_BJ[:, 0])


def seeded(draft: Draft, probs_BJV: Tensor, exponentials_BJV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of leading draft tokens that equal this tier's picks (B,), and its pick after them (B,).

    Daliri, Musco and Suresh 2024: the pick of a position is argmin(E / p) with standard exponentials E, which is the
    Gumbel-max sample of p. All tiers share the E of a position, so the picks of a text do not depend on the draft.
    """
    picks_BJ = race(probs_BJV, exponentials_BJV)
    accepted_B = _leading(draft, to_device(draft.tokens_BK, picks_BJ.device) == picks_BJ[:, :-1])
    return accepted_B, picks_BJ.gather(1, accepted_B[:, None]).squeeze(1)


def race(probs_BJV: Tensor, exponentials_BJV: Tensor) -> Tensor:
    """Winner (B, J) of an exponential race with rates `probs_BJV`: a sample of them, the lowest id among equals."""
    return (probs_BJV / exponentials_BJV).argmax(-1)


def draw(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw one token a row (B,), in proportion to float64 weights, by inversion. Never one of weight zero."""
    cdf_BV = weights_BV.cumsum(1)
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))  # u * total may round up to total
    return torch.searchsorted(
        cdf_BV, torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1), right=True
    ).squeeze(1)


def _leading(draft: Draft, fits_BK: Tensor) -> Tensor:
    """Number of draft tokens of each row before the first that does not fit: (B,)."""
    real_BK = to_device(np.arange(fits_BK.shape[1]) < draft.counts_B[:, None], fits_BK.device)
    return (fits_BK & real_BK).long().cumprod(1).sum(1)


class NoiseSource(Protocol):
    """Counter-based noise of the rows of a batch; see triforce.sampling.rng."""

    def exponentials(self, positions_BJ: Tensor, vocab_size: int) -> Tensor: ...

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor: ...


class Verification(Protocol):
    """Turns a draft of any distribution into a draft that is a sample of `probs_BJV`."""

    def probs_size(self, vocab_size: int) -> int:
        """Number of probabilities of each token that a draft must carry so that the tier above can verify it."""

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        """Return the accepted draft tokens and one more, samples of `probs_BJV`. lengths_B: tokens of the texts."""


class Rejection:
    """Rejection sampling. Highest acceptance of one token, 1 - TV(p, q); exact in distribution."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def probs_size(self, vocab_size: int) -> int:
        return vocab_size

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        uniforms_BJ = self.noise.uniforms(tier, probs_BJV.shape[1], (draft.counts_B + 1) * live_B)
        return accepted_draft(draft, *rejection(draft, probs_BJV, uniforms_BJ), probs_BJV, tier)


class BlockRejection(Rejection):
    """Rejection of blocks. Accepts more than `Rejection` where drafts are long; exact in distribution."""

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        uniforms_BJ = self.noise.uniforms(tier, probs_BJV.shape[1], (draft.counts_B + 1) * live_B)
        return accepted_draft(draft, *block(draft, probs_BJV, uniforms_BJ), probs_BJV, tier)


class Seeded:
    """Verification by shared noise. With a fixed seed the text is that of plain decoding, for all tiers and batches."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def probs_size(self, vocab_size: int) -> int:
        return 0

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        positions_BJ = to_device(columns(lengths_B, probs_BJV.shape[1]), probs_BJV.device)
        exponentials_BJV = self.noise.exponentials(positions_BJ, probs_BJV.shape[2])
        return accepted_draft(draft, *seeded(draft, probs_BJV, exponentials_BJV), probs_BJV[..., :0], tier)


def accepted_draft(draft: Draft, accepted_B: Tensor, tokens_B: Tensor, probs_BJV: Tensor, tier: int) -> Draft:
    """Return the accepted tokens and the drawn one, as a draft of the verifier. The host waits for the device here."""
    return accepted_on_host(draft, torch.stack((accepted_B, tokens_B)).cpu().numpy(), probs_BJV, tier)


def accepted_on_host(draft: Draft, decided_2B: Ints, probs_BJV: Tensor, tier: int) -> Draft:
    """Return the same from `decided_2B` on the host: the number of accepted tokens, and the drawn token."""
    accepted_B1, drawn_B1 = decided_2B[..., None]
    none_B1 = np.zeros_like(accepted_B1)
    tokens_BJ, origins_BJ = (
        np.concatenate((values_BK, none_B1), 1) for values_BK in (draft.tokens_BK, draft.origins_BK)
    )
    tokens_BJ[rows(len(accepted_B1)), accepted_B1] = drawn_B1
    origins_BJ[rows(len(accepted_B1)), accepted_B1] = tier
    return Draft(tokens_BJ, probs_BJV, origins_BJ, accepted_B1[:, 0] + 1)
