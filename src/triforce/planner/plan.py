"""Plans, and the expected tokens and seconds of a proposal by each plan.

The estimates use the closed form of multi-level speculation.
Where each draft token is accepted with probability `a`, independently, verifying g of them gives (1 - a^(g + 1)) /
(1 - a) tokens (Leviathan et al. 2023, equation 1). A tier verifies drafts of the tier below until it holds `gamma`
tokens, which it proposes to the tier above (Sun et al. 2024, section 4.2). All plans are estimated as one array: a
tier that a plan leaves out has a gamma of 0 there.

Shape suffixes: N plans, K retrieval budgets (1 for other tiers), Z the lower bound, mean and upper bound of an
estimate, W tokens of a pass from 0 on, G gammas from 0 on. Axis A says what is below the n-grams. 0: a draft
model. 1, "alone": nothing. The retrieval tier may be above them in both cases. Amounts of N plans are (N,), (Z, N) or
(K, Z, N).
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
"""Gammas of n-grams. After short matches n-grams propose fewer tokens anyway."""

MAX_GAMMA_BELOW_RETRIEVAL = 8
"""The largest gamma of a tier below the retrieval tier."""

MAX_ACCEPTANCE = 1 - 1e-9
"""Largest acceptance of the closed form, which divides by 1 - acceptance."""

MAX_OF_NORMALS = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42)
"""Mean of the largest of n normal variables, in standard deviations above their mean. The index is n."""

BudgetFactors = tuple[tuple[int, float], ...]
"""Pairs of a size of rows (bits of their token counts) and the factor of the retrieval tier's default budget for them.
Other sizes have a factor of 1."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiers from the lowest to the full one, and the tokens (gamma) that each lower tier proposes to the next.

    A draft model below n-grams drafts where they have no match.
    """

    tiers: tuple[str, ...] = ("full",)
    gammas: tuple[int, ...] = ()
    budget_factors: BudgetFactors = ()

    @property
    def plain(self) -> bool:
        """Whether the plan is plain decoding."""
        return len(self.tiers) == 1

    def __str__(self) -> str:
        drafting = [f"{tier} {gamma}" for tier, gamma in zip(self.tiers[:-1], self.gammas, strict=True)]
        return " > ".join([*drafting, self.tiers[-1]])


PLAIN = Plan()


class PlannedProposal(NamedTuple):
    """The plan of one proposal of the full tier, and the attention that this tier observes in it.

    grain: tokens of a unit (a page or a part of one) whose attention mass the full tier reports; 0: none is reported.
    """

    plan: Plan
    grain: int


@dataclass(frozen=True, slots=True)
class PlanSpace:
    """All plans that are considered, plain decoding first, and their gammas.

    families: slices of plans with the same tiers.
    """

    plans: tuple[Plan, ...]
    draft_N: Ints
    ngram_N: Ints
    retrieval_N: Ints
    families: tuple[slice, ...]


@cache
def plan_space(draft: bool, retrieval: bool) -> PlanSpace:
    """Return all plans. draft: there is a draft model. retrieval: the retrieval tier sees less than all tokens."""
    gammas = {"draft": NARROW_GAMMAS, "ngram": NGRAM_GAMMAS, "retrieval": WIDE_GAMMAS}
    lower = [tier for tier in gammas if {"draft": draft, "retrieval": retrieval}.get(tier, True)]
    plans = list[Plan]()
    families = list[slice]()
    for tiers in (tiers for count in range(len(lower) + 1) for tiers in combinations(lower, count)):
        family = [Plan((*tiers, "full"), tier_gammas) for tier_gammas in product(*map(gammas.__getitem__, tiers))]
        if "retrieval" in tiers:
            family = [plan for plan in family if max(plan.gammas[:-1], default=0) <= MAX_GAMMA_BELOW_RETRIEVAL]
        families.append(slice(len(plans), len(plans) + len(family)))
        plans += family
    gamma_maps = [dict(zip(plan.tiers, plan.gammas, strict=False)) for plan in plans]
    draft_N, ngram_N, retrieval_N = (
        np.array([tier_gammas.get(tier, 0) for tier_gammas in gamma_maps]) for tier in gammas
    )
    return PlanSpace(tuple(plans), draft_N, ngram_N, retrieval_N, tuple(families))


class NgramOdds(NamedTuple):
    """Odds of n-grams at places of the text (every 8th position), above a draft (0) and alone (1).

    In a loop the text repeats a long stretch, and one proposal may cover up to 17 tokens, thus several places. A mean
    over places would count such a proposal several times, so in loops proposals are counted per token of the text.
    looped_A: share of places in loops. rounds_AG, offered_AG: proposals in loops, and the tokens that they propose, per
    token of the text. Outside loops a proposal rarely reaches the next place, so each place counts as one possible
    proposal. found_A: of the places outside loops, the share with a match. proposed_AG, accepted_AG: mean tokens
    proposed and accepted at a place outside loops; a place without a match counts 0.
    """

    found_A: np.ndarray
    proposed_AG: np.ndarray
    accepted_AG: np.ndarray
    looped_A: np.ndarray
    rounds_AG: np.ndarray
    offered_AG: np.ndarray

    def acceptance(self, alone: int, gamma: int) -> float:
        """Return the share of proposed tokens that is accepted. alone: 0 above a draft, 1 alone."""
        cell = alone, gamma
        outside_rounds = (1 - self.looped_A[alone]) / (1 + self.accepted_AG[cell])
        # In loops the accepted tokens are all but one of each round: the verification draws that one.
        accepted = self.looped_A[alone] - self.rounds_AG[cell] + outside_rounds * self.accepted_AG[cell]
        return float(accepted / max(1e-9, self.offered_AG[cell] + outside_rounds * self.proposed_AG[cell]))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Costs and acceptance of the tiers, for the rows of a batch.

    seconds_KW: by tier, the seconds of a pass over W tokens of each row, or of a fused draft of W tokens; `FULL` and
    `AMONG_MODELS` count as two tiers. accepted_KZ: by tier, the accepted share of the draft tokens that the tier above
    reached. For n-grams: tokens that were accepted, over the tokens that `odds` predicted to be accepted.
    """

    rows: int
    seconds_KW: Mapping[str, np.ndarray]
    accepted_KZ: Mapping[str, np.ndarray]
    odds: NgramOdds


class Round(NamedTuple):
    """Draft tokens of each row for the tier above, their seconds, and the tokens that their verification gives.

    width: estimate of the draft tokens of the longest row; for the retrieval tier the mean. The pass that verifies them
    computes `width` + 1 tokens of a row.
    """

    tokens: Amount
    seconds: Amount
    verified: Amount
    width: Amount


def expected_tokens(acceptance: Amount, gamma: Amount) -> Amount:
    """Tokens from verifying `gamma` draft tokens, with the one drawn after them (Leviathan et al. 2023, eq. 1)."""
    acceptance = np.minimum(acceptance, MAX_ACCEPTANCE)
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def proposals(space: PlanSpace, estimates: Estimates) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected tokens of each row in one proposal of the full tier, and its seconds: (K, Z, N) each."""
    draft = _draft_round(space, estimates)
    if space.retrieval_N.any():
        retrieved = _retrieval_round(estimates, draft, space.retrieval_N)
        used_N = space.retrieval_N > 0
        draft = Round(*(np.where(used_N, *amounts) for amounts in zip(retrieved, draft, strict=True)))
    alone_N = space.draft_N + space.retrieval_N == 0
    full, among_models = (
        _interpolated_seconds(estimates.seconds_KW[tier][0], draft.width + 1) for tier in (FULL, AMONG_MODELS)
    )
    seconds = draft.seconds + np.where(alone_N, full, among_models)
    shape = *estimates.accepted_KZ["retrieval"].shape, len(space.plans)
    return np.broadcast_to(draft.verified, shape), np.broadcast_to(seconds, shape)


def _draft_round(space: PlanSpace, estimates: Estimates) -> Round:
    """Return the mean round of n-grams, and of the draft where n-grams have no match or are not used.

    `rounds` is the number of rounds that one token of the text needs, inside loops and outside (see `NgramOdds`).
    """
    draft_N = space.draft_N
    used_N = space.ngram_N > 0
    realized_Z1 = estimates.accepted_KZ["ngram"][0][:, None]
    alone_N = (draft_N == 0).astype(int)
    odds = estimates.odds
    cell_N = alone_N, space.ngram_N
    match_share, looped = (realized_Z1 * (used_N * share_A[alone_N]) for share_A in (odds.found_A, odds.looped_A))
    proposed, accepted, loop_rounds, offered = (
        realized_Z1 * (used_N * odds_AG[cell_N])
        for odds_AG in (odds.proposed_AG, odds.accepted_AG, odds.rounds_AG, odds.offered_AG)
    )
    drafted = expected_tokens(estimates.accepted_KZ["draft"][0][:, None], draft_N)
    other_rounds = (1 - looped) / (match_share + accepted + (1 - match_share) * drafted)
    rounds = loop_rounds + other_rounds
    proposed = (offered + other_rounds * proposed) / rounds
    match_share = (loop_rounds + other_rounds * match_share) / rounds
    miss_share = 1 - match_share
    # share of passes in which at least one row has a match, and share in which at least one row has none
    any_match = 1 - miss_share**estimates.rows
    any_miss = 1 - match_share**estimates.rows
    return Round(
        proposed + miss_share * draft_N,
        estimates.seconds_KW["ngram"][0, 1] * used_N + any_miss * estimates.seconds_KW["draft"][0, draft_N],
        1 / rounds,
        np.maximum(proposed / np.maximum(match_share, 1e-9) * any_match, any_miss * draft_N),
    )


def _retrieval_round(estimates: Estimates, below: Round, gamma_N: Ints) -> Round:
    """Return the round of the retrieval tier: rounds below it until each row has `gamma` tokens.

    All rows wait for the last one.
    """
    # The last round may give more tokens than are missing. The mean excess is assumed to be (verified - 1) / 2.
    rounds = np.maximum(1.0, (gamma_N + (below.verified - 1) / 2) / below.verified)
    tokens = rounds * below.verified
    # A round below gives 1 to `below.tokens` + 1 tokens; their variance is taken as 3/4 of the largest that this range
    # and mean allow.
    spread = 0.75 * np.maximum((below.verified - 1) * (below.tokens + 1 - below.verified), 0.0)
    longest = MAX_OF_NORMALS[min(estimates.rows, len(MAX_OF_NORMALS) - 1)]
    rounds = rounds + longest * np.sqrt(rounds * spread) / below.verified
    seconds = np.stack(
        [
            rounds * (below.seconds + _interpolated_seconds(row_W, below.width + 1))
            for row_W in estimates.seconds_KW["retrieval"]
        ]
    )
    return Round(tokens, seconds, expected_tokens(estimates.accepted_KZ["retrieval"][..., None], tokens), tokens)


def _interpolated_seconds(seconds_W: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the seconds of passes over `tokens`, interpolated between whole numbers, because `tokens` are means."""
    seconds: np.ndarray = np.interp(tokens, np.arange(len(seconds_W)), seconds_W)
    return seconds
