"""Plans, and what a proposal of each gives and takes by the closed form of multi-level speculation.

Where each draft token is accepted with probability `a`, independently, verifying g of them gives (1 - a^(g + 1)) /
(1 - a) tokens (Leviathan et al. 2023, equation 1); a tier repeats that until it holds `gamma` tokens, which it
proposes to the tier above (Sun et al. 2024, section 4.2). All plans are weighed as one array: a tier that a plan leaves
out has a gamma of 0 there.

Shape suffixes: N plans, K retrieval budgets, Z bounds of a belief, W tokens of a pass from 0 on, G gammas from 0 on, A
n-grams before a draft (0) and alone (1). Amounts of N plans are (N,), (Z, N) or (K, Z, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from triforce.ragged import Ints

Amount = Any
"""A number, or an array of them."""

WIDE_GAMMAS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
NARROW_GAMMAS = (1, 2, 3, 4, 6, 8)
NGRAM_GAMMAS = (4, 8, 16)
"""Of n-grams: behind short matches they propose less of themselves."""

MAX_ACCEPTANCE = 1 - 1e-9
"""An acceptance that is as good as 1."""

MAX_OF_NORMALS = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42)
"""Standard deviations that the largest of so many normal variables is above their mean."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiers from the lowest to the full one, and the tokens that each of the lower ones proposes to the next (gamma).

    A draft below n-grams drafts where they have no match. budget_factors: times the usual budget that the retrieval
    tier reads, by the bits of a context's length; 1 for others.
    """

    tiers: tuple[str, ...] = ("full",)
    gammas: tuple[int, ...] = ()
    budget_factors: tuple[tuple[int, float], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it is plain decoding."""
        return len(self.tiers) == 1

    def __str__(self) -> str:
        drafting = [f"{tier} {gamma}" for tier, gamma in zip(self.tiers[:-1], self.gammas, strict=True)]
        return " > ".join([*drafting, self.tiers[-1]])


PLAIN = Plan()


@dataclass(frozen=True, slots=True)
class PlanSpace:
    """Plans that are worth a thought, and their gammas: plain decoding first, those with a retrieval tier last.

    alone: how many have n-grams at most, direct: no retrieval tier. families: slices of plans of the same tiers.
    """

    plans: tuple[Plan, ...]
    draft_N: Ints
    ngram_N: Ints
    retrieval_N: Ints
    alone: int
    direct: int
    families: tuple[slice, ...]


@cache
def plan_space(draft: bool, retrieval: bool) -> PlanSpace:
    """Return all plans, with a draft model or not, with a middle tier where that would see less than all."""
    drafts, low = NARROW_GAMMAS, NGRAM_GAMMAS[:2]
    choices: list[dict[str, tuple[int, ...]]] = [{}, {"ngram": NGRAM_GAMMAS}]
    if draft:
        choices += [{"draft": drafts}, {"draft": drafts, "ngram": NGRAM_GAMMAS}]
    if retrieval:
        below: list[dict[str, tuple[int, ...]]] = [{}, {"ngram": low}]
        below += [{"draft": drafts}, {"draft": drafts, "ngram": low}] if draft else []
        choices += [{**each, "retrieval": WIDE_GAMMAS} for each in below]
    found = [[Plan((*each, "full"), gammas) for gammas in product(*each.values())] for each in choices]
    plans = [plan for some in found for plan in some]
    gammas = [dict(zip(plan.tiers, plan.gammas, strict=False)) for plan in plans]
    draft_N, ngram_N, retrieval_N = (np.array([g.get(t, 0) for g in gammas]) for t in ("draft", "ngram", "retrieval"))
    ends = np.cumsum([len(some) for some in found]).tolist()
    families = tuple(slice(start, end) for start, end in zip([0, *ends], ends, strict=False))
    direct = int((retrieval_N == 0).sum())
    return PlanSpace(tuple(plans), draft_N, ngram_N, retrieval_N, families[1].stop, direct, families)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Costs and acceptance of the tiers, for the rows of a batch.

    full_W, retrieval_KW: seconds of a pass over so many tokens of each row; among_W: of the full tier among other
    models. draft_G: of a fused draft; ngram: of a look.
    draft_Z, retrieval_KZ: the share of draft tokens that is accepted, of those that the tier above looked at.
    proposed_AG, accepted_AG: tokens of n-grams in the mean of places. found_A: the share of places with a match.
    trust_Z: the part of these three that comes true.
    """

    rows: int
    full_W: np.ndarray
    among_W: np.ndarray
    retrieval_KW: np.ndarray
    draft_G: np.ndarray
    ngram: float
    draft_Z: np.ndarray
    retrieval_KZ: np.ndarray
    proposed_AG: np.ndarray
    accepted_AG: np.ndarray
    found_A: np.ndarray
    trust_Z: np.ndarray


@dataclass(frozen=True, slots=True)
class _Round:
    """Draft tokens of one round, their seconds, and the tokens that verifying them gives.

    width: draft tokens of the row that has most of them, as a pass is as wide as that.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    verified: np.ndarray
    width: np.ndarray

    def some(self, plans: slice) -> _Round:
        return _Round(*(getattr(self, name)[..., plans] for name in self.__slots__))

    def then(self, other: _Round) -> _Round:
        """Return these plans, and behind them those of another round, which has budgets."""
        both = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return _Round(*(np.concatenate((np.broadcast_to(a, (*b.shape[:-1], a.shape[-1])), b), -1) for a, b in both))


def proposals(space: PlanSpace, it: Estimates) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each row to expect of one proposal of the full tier, and its seconds: (K, Z, N) each."""
    draft_N = space.draft_N
    drafted = expected(it.draft_Z[:, None], draft_N)
    below = _ngrams(space, it, _Round(draft_N, it.draft_G[draft_N], drafted, draft_N))
    if space.direct < len(space.plans):
        part = slice(space.direct, None)
        below = below.some(slice(space.direct)).then(_retrieved(it, below.some(part), space.retrieval_N[part]))
    alone = space.alone
    width = np.broadcast_to(below.width, below.verified.shape) + 1
    full = np.concatenate((_at(it.full_W, width[..., :alone]), _at(it.among_W, width[..., alone:])), -1)
    seconds = below.seconds + full
    shape = len(it.retrieval_KW), len(it.draft_Z), len(space.plans)
    return np.broadcast_to(below.verified, shape), np.broadcast_to(seconds, shape)


def expected(acceptance: Amount, gamma: Amount) -> Amount:
    """Tokens that verifying `gamma` draft tokens gives, with the one drawn behind them (Leviathan et al., eq. 1)."""
    acceptance = np.minimum(acceptance, MAX_ACCEPTANCE)
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def _ngrams(space: PlanSpace, it: Estimates, drafted: _Round) -> _Round:
    """A round of n-grams, and of the draft below where they have no match."""
    alone_N, used_N, trust_Z1 = (space.draft_N == 0).astype(int), space.ngram_N > 0, it.trust_Z[:, None]
    found = trust_Z1 * (used_N * it.found_A[alone_N])
    proposed = trust_Z1 * (used_N * it.proposed_AG[alone_N, space.ngram_N])
    accepted = trust_Z1 * (used_N * it.accepted_AG[alone_N, space.ngram_N])
    somewhere, lacking, missing = 1 - (1 - found) ** it.rows, 1 - found**it.rows, 1 - found  # in some row
    width = np.maximum(proposed / np.maximum(found, 1e-9) * somewhere, lacking * drafted.width)
    seconds = it.ngram * used_N + lacking * drafted.seconds
    return _Round(proposed + missing * drafted.tokens, seconds, found + accepted + missing * drafted.verified, width)


def _retrieved(it: Estimates, below: _Round, gamma_N: Ints) -> _Round:
    """Rounds of tokens verified by the retrieval tier until there are `gamma`; of many rows all wait for the last."""
    rounds = np.maximum(1.0, (gamma_N + (below.verified - 1) / 2) / below.verified)
    tokens = rounds * below.verified
    if it.rows > 1:
        spread = 0.75 * (below.verified - 1) * (below.tokens + 1 - below.verified)
        deviation = np.sqrt(rounds * np.maximum(spread, 0.0)) / below.verified
        rounds = rounds + MAX_OF_NORMALS[min(it.rows, len(MAX_OF_NORMALS) - 1)] * deviation
    verified_KZN = expected(it.retrieval_KZ[..., None], tokens)
    seconds_KZN = np.stack([rounds * (below.seconds + _at(row_W, below.width + 1)) for row_W in it.retrieval_KW])
    tokens_KZN = np.broadcast_to(tokens, verified_KZN.shape)
    return _Round(tokens_KZN, seconds_KZN, verified_KZN, tokens_KZN)


def _at(seconds_W: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Seconds of passes over so many tokens in the mean."""
    found: np.ndarray = np.interp(tokens, np.arange(len(seconds_W)), seconds_W)
    return found
