"""How a guess of one law becomes a sample of another: the only place where tokens are accepted or refused.

`rejection`, `block` and `seeded` are pure functions of a draft, the verifier's probabilities and noise. `Rejection`,
`BlockRejection` and `Seeded` bind them to a source of noise. Shape suffixes: B rows, K drafted tokens, J = K + 1, V
vocabulary.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.ragged import Bools, Ints, columns, rows, there
from triforce.speculation.draft import Draft


def rejection(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many guesses to keep, and the token drawn after them (Leviathan et al. 2023, Algorithm 1), rows ragged.

    A guess x ~ q is kept with probability min(1, p(x) / q(x)); at the first refusal the token is drawn from
    norm(max(p - q, 0)), and where nothing was refused (q = 0) from p itself: the bonus token. The first uniform of a
    row is for the draw and the others for its guesses, so that a row with fewer guesses than its mates uses fewer.
    """
    (B, K), device = draft.tokens_BK.shape, probs_BJV.device
    rows_B, counts_B = torch.arange(B, device=device), there(draft.counts_B, device)
    laws_BKV, tokens_BK1 = draft.laws_BKV.to(device), there(draft.tokens_BK, device)[..., None]
    p_BK = probs_BJV[:, :K].gather(2, tokens_BK1).squeeze(2)
    q_BK = laws_BKV.gather(2, tokens_BK1).squeeze(2)
    kept_B = _leading(draft, uniforms_BJ[:, 1:] * q_BK < p_BK)
    p_BV = probs_BJV[rows_B, kept_B]
    refused_B = kept_B < counts_B
    q_BV = F.pad(laws_BKV, (0, 0, 0, 1))[rows_B, kept_B] * refused_B[:, None]
    owed_BV = (p_BV - q_BV).clamp_min(0)
    owed_BV = torch.where(owed_BV.sum(1, keepdim=True) > 0, owed_BV, p_BV)  # p == q up to rounding
    return kept_B, draw(owed_BV, uniforms_BJ[:, 0])


def block(draft: Draft, probs_BJV: Tensor, uniforms_BJ: Tensor) -> tuple[Tensor, Tensor]:
    """`rejection` of the guesses as a whole: keeps at least as many (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

    reach_j = min(1, reach_(j-1) p(x_j) / q(x_j)), from reach_0 = 1, is the chance that at least j guesses are kept, and
    p(x) reach_j of it is owed to each token x behind them (equation 3). The guess behind gives q(x) of that at most, so
    owed_j(x) = max(p(x) reach_j - q(x), 0) must come from ending at j. A row's guesses end at j unless a later one
    passes; given that none does, j passes with probability sum owed_j / (sum owed_j + 1 - reach_j) (equation 4). Behind
    the last guess q = 0, and that is reach_j. The uniforms are those of `rejection`.
    """
    (B, K), device = draft.tokens_BK.shape, probs_BJV.device
    rows_B, counts_B = torch.arange(B, device=device), there(draft.counts_B, device)
    columns_J = torch.arange(K + 1, device=device)
    tokens_BK1 = there(draft.tokens_BK, device)[..., None]
    laws_BJV = F.pad(draft.laws_BKV.to(device), (0, 0, 0, 1)) * (columns_J < counts_B[:, None])[..., None]
    ratios_BK = (probs_BJV[:, :K].gather(2, tokens_BK1) / laws_BJV[:, :K].gather(2, tokens_BK1)).squeeze(2)
    one_B = torch.ones(B, dtype=probs_BJV.dtype, device=device)
    reach_BJ = torch.stack([*accumulate(ratios_BK.unbind(1), lambda a, b: (a * b).clamp_max(1), initial=one_B)], 1)
    owed_BJV = (reach_BJ[..., None] * probs_BJV - laws_BJV).clamp_min(0)
    owed_BJ = owed_BJV.sum(2)
    passes_BJ = (uniforms_BJ * (owed_BJ + (1 - reach_BJ)) < owed_BJ) & (columns_J <= counts_B[:, None])
    kept_B = (passes_BJ * columns_J).amax(1)
    owed_BV, p_BV = owed_BJV[rows_B, kept_B], probs_BJV[rows_B, kept_B]
    owed_BV = torch.where(owed_BV.sum(1, keepdim=True) > 0, owed_BV, p_BV)  # p == q up to rounding
    return kept_B, draw(owed_BV, uniforms_BJ[:, 0])


def seeded(draft: Draft, probs_BJV: Tensor, exponentials_BJV: Tensor) -> tuple[Tensor, Tensor]:
    """How many guesses equal this tier's own picks, and its pick after them (Daliri, Musco and Suresh 2024).

    The pick of a position is argmin(E / p) with standard exponentials E, which is the Gumbel-max sample of p. All tiers
    share the E of a position, so the picks of a text do not depend on what was guessed.
    """
    picks_BJ = race(probs_BJV, exponentials_BJV)
    kept_B = _leading(draft, there(draft.tokens_BK, picks_BJ.device) == picks_BJ[:, :-1])
    return kept_B, picks_BJ.gather(1, kept_B[:, None]).squeeze(1)


def race(probs_BJV: Tensor, exponentials_BJV: Tensor) -> Tensor:
    """The winner of an exponential race with rates `probs_BJV`: a sample of it, lowest id among equals."""
    return (probs_BJV / exponentials_BJV).argmax(-1)


def draw(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """One token a row, proportional to float64 weights, by inversion. Never a token of weight zero."""
    cdf_BV = weights_BV.cumsum(1)
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))  # u * total may round up to total
    return torch.searchsorted(
        cdf_BV, torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1), right=True
    ).squeeze(1)


def _leading(draft: Draft, fits_BK: Tensor) -> Tensor:
    real_BK = there(np.arange(fits_BK.shape[1]) < draft.counts_B[:, None], fits_BK.device)
    return (fits_BK & real_BK).long().cumprod(1).sum(1)


class NoiseSource(Protocol):
    """Counter-based noise of the rows of a batch; see triforce.sampling.rng."""

    def exponentials(self, positions_BJ: Tensor, vocab_size: int) -> Tensor: ...

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor: ...


class Verification(Protocol):
    """Turns a draft of any law into a draft of `probs_BJV`."""

    def law_size(self, vocab_size: int) -> int:
        """Entries of each token's law that a draft must carry so that the tier above can verify it."""

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        """The guesses kept and one token more, all of them samples of `probs_BJV`; `lengths_B` is the text's length."""


class Rejection:
    """Highest acceptance: 1 - TV(p, q) per token. Exact in distribution."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def law_size(self, vocab_size: int) -> int:
        return vocab_size

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        uniforms_BJ = self.noise.uniforms(tier, probs_BJV.shape[1], (draft.counts_B + 1) * live_B)
        return settle(draft, *rejection(draft, probs_BJV, uniforms_BJ), probs_BJV, tier)


class BlockRejection(Rejection):
    """Keeps more than `Rejection` where drafts are long. Exact in distribution."""

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        uniforms_BJ = self.noise.uniforms(tier, probs_BJV.shape[1], (draft.counts_B + 1) * live_B)
        return settle(draft, *block(draft, probs_BJV, uniforms_BJ), probs_BJV, tier)


class Seeded:
    """The text of a seed is the same with and without speculation, whatever the tiers, gamma or batch mates."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def law_size(self, vocab_size: int) -> int:
        return 0

    def verify(self, draft: Draft, probs_BJV: Tensor, lengths_B: Ints, live_B: Bools, tier: int) -> Draft:
        positions_BJ = there(columns(lengths_B, probs_BJV.shape[1]), probs_BJV.device)
        exponentials_BJV = self.noise.exponentials(positions_BJ, probs_BJV.shape[2])
        return settle(draft, *seeded(draft, probs_BJV, exponentials_BJV), probs_BJV[..., :0], tier)


def settle(draft: Draft, kept_B: Tensor, tokens_B: Tensor, laws_BJV: Tensor, tier: int) -> Draft:
    """The kept guesses with the drawn token behind them, as a draft of the verifier's law: the host waits here."""
    kept_B1, drawn_B1 = torch.stack((kept_B, tokens_B)).cpu().numpy()[..., None]
    none_B1 = np.zeros_like(kept_B1)
    tokens_BJ, origins_BJ = (np.concatenate((x, none_B1), 1) for x in (draft.tokens_BK, draft.origins_BK))
    tokens_BJ[rows(len(kept_B1)), kept_B1], origins_BJ[rows(len(kept_B1)), kept_B1] = drawn_B1, tier
    return Draft(tokens_BJ, laws_BJV, origins_BJ, kept_B1[:, 0] + 1)
