"""Plans, and their tokens per second by the closed form of multi-level speculation.

Where each draft token is accepted with probability `a`, independently, verifying g of them gives (1 - a^(g + 1)) /
(1 - a) tokens (Leviathan et al. 2023, equation 1); a tier repeats that until it holds `gamma` tokens, which it
proposes to the tier above (Sun et al. 2024, section 4.2). Amounts are numbers, or arrays over plans of the same tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

Amount = Any
"""A number, or an array of them."""

WIDE_GAMMAS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
NARROW_GAMMAS = (1, 2, 3, 4, 6, 8)
NGRAM_GAMMAS = (4, 8, 16)
"""Of n-grams alone: behind short matches they propose less of themselves."""

MAX_ACCEPTANCE = 1 - 1e-9
"""An acceptance that is as good as 1."""

MAX_OF_NORMALS = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42)
"""Standard deviations that the largest of so many normal variables is above their mean."""


class TierEstimates(Protocol):
    """Costs and acceptance of the tiers, for the rows of a batch."""

    rows: int

    def cost(self, tier: str, tokens: Amount) -> Amount:
        """Seconds of a pass of a tier over so many tokens of each row."""

    def draft_cost(self, tier: str, tokens: Amount) -> Amount:
        """Seconds in which a tier drafts so many tokens of each row, one after another."""

    def acceptance(self, tier: str) -> Amount:
        """The share of a tier's draft tokens that is accepted, of those that the tier above looked at."""

    def hindsight(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        """Return tokens proposed and accepted of n-grams of `gamma` at most, and the share of places with a match.

        alone: no draft is below, so that shorter matches suffice.
        """


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
class _Round:
    """Draft tokens of one round, their seconds, and the tokens that verifying them gives.

    width: draft tokens of the row that has most of them, as a pass is as wide as that.
    """

    tokens: Amount
    seconds: Amount
    verified: Amount
    width: Amount


def rate(tiers: tuple[str, ...], gammas: tuple[Amount, ...], estimates: TierEstimates) -> Amount:
    """Tokens per second of each row to expect of plans of these tiers."""
    tokens, seconds = proposal(tiers, gammas, estimates)
    return tokens / seconds


def proposal(tiers: tuple[str, ...], gammas: tuple[Amount, ...], estimates: TierEstimates) -> tuple[Amount, Amount]:
    """Tokens of each row to expect of one proposal of plans of these tiers, and its seconds."""
    steps = list(zip(tiers, (*gammas, 1), strict=True))
    if "ngram" in tiers:
        at = tiers.index("ngram")
        below, steps = _ngrams(estimates, steps[at][1], "draft" if at else None), steps[at + 1 :]
    else:
        below, steps = _drafted(estimates, *steps[0]), steps[1:]
    for tier, gamma in steps:
        below = _verified(estimates, below, tier, gamma)
    return below.tokens, below.seconds


def expected(acceptance: Amount, gamma: Amount) -> Amount:
    """Tokens that verifying `gamma` draft tokens gives, with the one drawn behind them (Leviathan et al., eq. 1)."""
    acceptance = np.minimum(acceptance, MAX_ACCEPTANCE)
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def _drafted(estimates: TierEstimates, tier: str, gamma: Amount) -> _Round:
    """A round of a tier that drafts token by token."""
    return _Round(gamma, estimates.draft_cost(tier, gamma), expected(estimates.acceptance(tier), gamma), gamma)


def _ngrams(estimates: TierEstimates, gamma: Amount, below: str | None) -> _Round:
    """A round of n-grams, and of the draft below where there is no match."""
    proposed, accepted, found = estimates.hindsight(gamma, below is None)
    somewhere = 1 - (1 - found) ** estimates.rows
    width, seconds = proposed / found * somewhere if found else 0.0 * proposed, estimates.cost("ngram", 1)
    if below is None:
        return _Round(proposed, seconds, 1 + accepted, width)
    rest, missing = _drafted(estimates, below, gamma), 1 - found
    lacking = 1 - found**estimates.rows  # in some row
    verified = found + accepted + missing * rest.verified
    tokens, width = proposed + missing * rest.tokens, np.maximum(width, lacking * rest.width)
    return _Round(tokens, seconds + lacking * rest.seconds, verified, width)


def _verified(estimates: TierEstimates, below: _Round, tier: str, gamma: Amount) -> _Round:
    """Rounds of verified draft tokens until there are `gamma`; of many rows all wait for the last one."""
    rounds = np.maximum(1.0, (gamma + (below.verified - 1) / 2) / below.verified)
    tokens = rounds * below.verified
    if estimates.rows > 1 and tier != "full":
        spread = 0.75 * (below.verified - 1) * (below.tokens + 1 - below.verified)
        deviation = np.sqrt(rounds * np.maximum(spread, 0.0)) / below.verified
        rounds = rounds + MAX_OF_NORMALS[min(estimates.rows, len(MAX_OF_NORMALS) - 1)] * deviation
    seconds = rounds * (below.seconds + estimates.cost(tier, below.width + 1))
    return _Round(tokens, seconds, expected(estimates.acceptance(tier), tokens), tokens)


@cache
def families(draft: bool, retrieval: bool) -> tuple[tuple[tuple[str, ...], tuple[np.ndarray, ...]], ...]:
    """All plans beside plain decoding that are worth a thought, by their tiers: arrays of gammas of the lower ones.

    With a draft model or not, with a middle tier where that would see less than all.
    """
    wide, narrow = np.array(WIDE_GAMMAS), np.array(NARROW_GAMMAS)
    low, high = (each.ravel() for each in np.meshgrid(narrow, wide))
    found: list[tuple[tuple[str, ...], tuple[np.ndarray, ...]]] = []
    if draft:
        found += [(("draft", "full"), (narrow,)), (("draft", "ngram", "full"), (narrow, narrow))]
    found.append((("ngram", "full"), (np.array(NGRAM_GAMMAS),)))
    if retrieval:
        found += [(("retrieval", "full"), (wide,)), (("ngram", "retrieval", "full"), (low, high))]
    if draft and retrieval:
        found.append((("draft", "retrieval", "full"), (low, high)))
        found.append((("draft", "ngram", "retrieval", "full"), (low, low, high)))
    return tuple(found)
