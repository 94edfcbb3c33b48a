"""Plans, and what a proposal of each gives and takes by the closed form of multi-level speculation.

Where each draft token is accepted with probability `a`, independently, verifying g of them gives (1 - a^(g + 1)) /
(1 - a) tokens (Leviathan et al. 2023, equation 1); a tier repeats that until it holds `gamma` tokens, which it
proposes to the tier above (Sun et al. 2024, section 4.2). All plans are weighed as one array: a tier that a plan leaves
out has a gamma of 0 there.

Shape suffixes: N plans, K retrieval budgets, Z bounds of a belief, W tokens of a pass from 0 on, G gammas from 0 on, A
n-grams before a draft (0) and alone (1). Amounts of N plans are (N,), (Z, N) or (K, Z, N).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from triforce.planner.planner_config import AMONG_MODELS, FULL
from triforce.ragged import Ints

Amount = Any
"""A number, or an array of them."""

WIDE_GAMMAS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
NARROW_GAMMAS = (1, 2, 3, 4, 6, 8)
NGRAM_GAMMAS = (4, 8, 16)
"""Of n-grams: behind short matches they propose less of themselves."""

BELOW_ANOTHER = 8
"""The largest gamma of a tier below the retrieval tier."""

MAX_ACCEPTANCE = 1 - 1e-9
"""An acceptance that is as good as 1."""

MAX_OF_NORMALS = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42)
"""Standard deviations that the largest of so many normal variables is above their mean."""

BudgetFactors = tuple[tuple[int, float], ...]
"""Times the usual budget that the retrieval tier reads, by the bits of a row's length; 1 where it is left out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiers from the lowest to the full one, and the tokens that each of the lower ones proposes to the next (gamma).

    A draft below n-grams drafts where they have no match.
    """

    tiers: tuple[str, ...] = ("full",)
    gammas: tuple[int, ...] = ()
    budget_factors: BudgetFactors = ()

    @property
    def plain(self) -> bool:
        """Whether it is plain decoding."""
        return len(self.tiers) == 1

    def __str__(self) -> str:
        drafting = [f"{tier} {gamma}" for tier, gamma in zip(self.tiers[:-1], self.gammas, strict=True)]
        return " > ".join([*drafting, self.tiers[-1]])


PLAIN = Plan()


class PlannedProposal(NamedTuple):
    """The plan of one proposal of the full tier, and what that tier is to observe in it.

    grain: tokens of the units whose attention mass it reports; 0: of none.
    """

    plan: Plan
    grain: int


@dataclass(frozen=True, slots=True)
class PlanSpace:
    """Plans that are worth a thought, plain decoding first, and their gammas. families: slices of the same tiers."""

    plans: tuple[Plan, ...]
    draft_N: Ints
    ngram_N: Ints
    retrieval_N: Ints
    families: tuple[slice, ...]


@cache
def plan_space(draft: bool, retrieval: bool) -> PlanSpace:
    """Return all plans, with a draft model or not, with a middle tier where that would see less than all."""
    gammas = {"draft": NARROW_GAMMAS, "ngram": NGRAM_GAMMAS, "retrieval": WIDE_GAMMAS}
    lower = [tier for tier in gammas if {"draft": draft, "retrieval": retrieval}.get(tier, True)]
    plans = list[Plan]()
    families = list[slice]()
    for tiers in (tiers for count in range(len(lower) + 1) for tiers in combinations(lower, count)):
        some = [Plan((*tiers, "full"), each) for each in product(*map(gammas.__getitem__, tiers))]
        if "retrieval" in tiers:
            some = [plan for plan in some if max(plan.gammas[:-1], default=0) <= BELOW_ANOTHER]
        families.append(slice(len(plans), len(plans) + len(some)))
        plans += some
    of = [dict(zip(plan.tiers, plan.gammas, strict=False)) for plan in plans]
    draft_N, ngram_N, retrieval_N = (np.array([each.get(tier, 0) for each in of]) for tier in gammas)
    return PlanSpace(tuple(plans), draft_N, ngram_N, retrieval_N, tuple(families))


class NgramOdds(NamedTuple):
    """Odds of n-grams at places of the text, where a draft stands below them (0) and alone (1).

    Where the text goes on as it did before for long, a proposal leads over many places: such places are told apart,
    and counted for each token of the text. looped_A: their share; rounds_AG, offered_AG: proposals that lead over them,
    and tokens of these. At other places a proposal may begin anywhere. found_A: the share of them with a match;
    proposed_AG, accepted_AG: tokens, in the mean of them.
    """

    found_A: np.ndarray
    proposed_AG: np.ndarray
    accepted_AG: np.ndarray
    looped_A: np.ndarray
    rounds_AG: np.ndarray
    offered_AG: np.ndarray

    def acceptance(self, alone: int, gamma: int) -> float:
        """Return the share of proposed tokens that is accepted."""
        at = alone, gamma
        outside = (1 - self.looped_A[alone]) / (1 + self.accepted_AG[at])
        accepted = self.looped_A[alone] - self.rounds_AG[at] + outside * self.accepted_AG[at]
        return float(accepted / max(1e-9, self.offered_AG[at] + outside * self.proposed_AG[at]))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Costs and acceptance of the tiers, for the rows of a batch.

    seconds_KW: by tier, of a pass over so many tokens of each row, or of as many of a fused draft; the full tier among
    other models is told apart. accepted_KZ: by tier, the share of draft tokens that is accepted, of those that the tier
    above looked at; of n-grams the part that comes true of what hindsight predicts, their `odds`.
    """

    rows: int
    seconds_KW: Mapping[str, np.ndarray]
    accepted_KZ: Mapping[str, np.ndarray]
    odds: NgramOdds


class Round(NamedTuple):
    """Draft tokens of each row for the tier above, their seconds, and the tokens that verifying them gives.

    width: draft tokens of the row that has most of them, as a pass is as wide as that.
    """

    tokens: Amount
    seconds: Amount
    verified: Amount
    width: Amount


def expected(acceptance: Amount, gamma: Amount) -> Amount:
    """Tokens that verifying `gamma` draft tokens gives, with the one drawn behind them (Leviathan et al., eq. 1)."""
    acceptance = np.minimum(acceptance, MAX_ACCEPTANCE)
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def proposals(space: PlanSpace, it: Estimates) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each row to expect of one proposal of the full tier, and its seconds: (K, Z, N) each."""
    draft = _drafted(space, it)
    if space.retrieval_N.any():
        retrieved = _retrieved(it, draft, space.retrieval_N)
        used_N = space.retrieval_N > 0
        draft = Round(*(np.where(used_N, *both) for both in zip(retrieved, draft, strict=True)))
    alone_N = space.draft_N + space.retrieval_N == 0
    full, among = (_at(it.seconds_KW[tier][0], draft.width + 1) for tier in (FULL, AMONG_MODELS))
    seconds = draft.seconds + np.where(alone_N, full, among)
    shape = *it.accepted_KZ["retrieval"].shape, len(space.plans)
    return np.broadcast_to(draft.verified, shape), np.broadcast_to(seconds, shape)


def _drafted(space: PlanSpace, it: Estimates) -> Round:
    """A round of n-grams, and of the draft where they have no match or are not used.

    Rounds are counted for each token of the text, inside of what repeats itself and outside.
    """
    draft_N = space.draft_N
    used_N = space.ngram_N > 0
    trust_Z1 = it.accepted_KZ["ngram"][0][:, None]
    alone_N = (draft_N == 0).astype(int)
    odds = it.odds
    place_N = alone_N, space.ngram_N
    found, looped = (trust_Z1 * (used_N * share_A[alone_N]) for share_A in (odds.found_A, odds.looped_A))
    proposed, accepted, inside, offered = (
        trust_Z1 * (used_N * each_AG[place_N])
        for each_AG in (odds.proposed_AG, odds.accepted_AG, odds.rounds_AG, odds.offered_AG)
    )
    drafted = expected(it.accepted_KZ["draft"][0][:, None], draft_N)
    outside = (1 - looped) / (found + accepted + (1 - found) * drafted)
    rounds = inside + outside
    proposed = (offered + outside * proposed) / rounds
    found = (inside + outside * found) / rounds
    missing = 1 - found
    # in some row
    somewhere = 1 - missing**it.rows
    lacking = 1 - found**it.rows
    return Round(
        proposed + missing * draft_N,
        it.seconds_KW["ngram"][0, 1] * used_N + lacking * it.seconds_KW["draft"][0, draft_N],
        1 / rounds,
        np.maximum(proposed / np.maximum(found, 1e-9) * somewhere, lacking * draft_N),
    )


def _retrieved(it: Estimates, below: Round, gamma_N: Ints) -> Round:
    """Rounds of tokens verified by the retrieval tier until there are `gamma`; of many rows all wait for the last."""
    rounds = np.maximum(1.0, (gamma_N + (below.verified - 1) / 2) / below.verified)
    tokens = rounds * below.verified
    spread = 0.75 * np.maximum((below.verified - 1) * (below.tokens + 1 - below.verified), 0.0)
    longest = MAX_OF_NORMALS[min(it.rows, len(MAX_OF_NORMALS) - 1)]
    rounds = rounds + longest * np.sqrt(rounds * spread) / below.verified
    seconds = np.stack([rounds * (below.seconds + _at(row_W, below.width + 1)) for row_W in it.seconds_KW["retrieval"]])
    return Round(tokens, seconds, expected(it.accepted_KZ["retrieval"][..., None], tokens), tokens)


def _at(seconds_W: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Seconds of passes over so many tokens in the mean."""
    found: np.ndarray = np.interp(tokens, np.arange(len(seconds_W)), seconds_W)
    return found
