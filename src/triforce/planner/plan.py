"""What a plan is worth: tokens per second of a ladder, by the closed form of multi-level speculation.

With a share `a` of guesses kept, one by one and independently, verifying g guesses gives (1 - a^(g + 1)) / (1 - a)
tokens (Leviathan et al. 2023, equation 1); a tier goes round until it holds `gamma` of them, and is a guesser itself
(Sun et al. 2024, section 4.2). Amounts are numbers, or arrays over many plans of the same tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

Amount = Any
"""A number, or an array of them."""

WIDE = (1, 2, 3, 4, 6, 8, 10, 12, 16)
NARROW = (1, 2, 3, 4, 6, 8)

CERTAIN = 1 - 1e-9
"""A share of guesses kept that is as good as all."""

LAST_OF = (0.0, 0.0, 0.56, 0.85, 1.03, 1.16, 1.27, 1.35, 1.42)
"""By how many deviations the largest of so many normal variables is above their mean."""


class TierEstimates(Protocol):
    """What is known of the tiers, for the rows that there are."""

    rows: int

    def cost(self, tier: str, tokens: Amount) -> Amount:
        """Seconds of a pass of a tier over so many tokens of each row."""

    def alone(self, tier: str, tokens: Amount) -> Amount:
        """Seconds in which a tier makes so many guesses of each row, one after another."""

    def share(self, tier: str) -> Amount:
        """Of the guesses of a tier that another one looked at, the share that it kept."""

    def echo(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        """Of lookup with so many guesses at most: those made, those kept, and how often there were some.

        `alone`: where there is no other guesser, so that shorter matches count.
        """


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiers from the lowest to the full one, and how many tokens each of the lower ones gathers before it is judged.

    A draft with lookup on it guesses where the text does not repeat itself. times: how many times its budget the
    retrieval tier reads of contexts of so many bits; of others once.
    """

    tiers: tuple[str, ...] = ("full",)
    gammas: tuple[int, ...] = ()
    times: tuple[tuple[int, float], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether nothing is guessed."""
        return len(self.tiers) == 1

    def __str__(self) -> str:
        guessers = [f"{tier} {gamma}" for tier, gamma in zip(self.tiers[:-1], self.gammas, strict=True)]
        return " > ".join([*guessers, self.tiers[-1]])


@dataclass(frozen=True, slots=True)
class _Offer:
    """Guesses of one round, the seconds they take, and the tokens that verifying them gives.

    width: guesses of the row that has most of them, as a pass is as wide as that.
    """

    tokens: Amount
    seconds: Amount
    gives: Amount
    width: Amount


def rate(tiers: tuple[str, ...], gammas: tuple[Amount, ...], world: TierEstimates) -> Amount:
    """Tokens per second of each row that are to be expected, of plans of these tiers."""
    steps = list(zip(tiers, (*gammas, 1), strict=True))
    if "ngram" in tiers:
        at = tiers.index("ngram")
        offer, steps = _lookup(world, steps[at][1], "draft" if at else None), steps[at + 1 :]
    else:
        offer, steps = _alone(world, *steps[0]), steps[1:]
    for tier, gamma in steps:
        offer = _verified(world, offer, tier, gamma)
    return offer.tokens / offer.seconds


def expected(acceptance: Amount, guesses: Amount) -> Amount:
    """Tokens that verifying so many guesses gives, the one drawn behind them included."""
    acceptance = np.minimum(acceptance, CERTAIN)
    return (1 - acceptance ** (guesses + 1)) / (1 - acceptance)


def _alone(world: TierEstimates, tier: str, gamma: Amount) -> _Offer:
    """A tier that guesses token by token."""
    return _Offer(gamma, world.alone(tier, gamma), expected(world.share(tier), gamma), gamma)


def _lookup(world: TierEstimates, gamma: Amount, below: str | None) -> _Offer:
    """Guesses from the text, and those of the draft where there are none."""
    made, kept, found = world.echo(gamma, below is None)
    somewhere = 1 - (1 - found) ** world.rows
    width, seconds = made / found * somewhere if found else 0.0 * made, world.cost("ngram", 1)
    if below is None:
        return _Offer(made, seconds, 1 + kept, width)
    rest, missing = _alone(world, below, gamma), 1 - found
    lacking = 1 - found**world.rows  # in some row
    gives = found + kept + missing * rest.gives
    tokens, width = made + missing * rest.tokens, np.maximum(width, lacking * rest.width)
    return _Offer(tokens, seconds + lacking * rest.seconds, gives, width)


def _verified(world: TierEstimates, below: _Offer, tier: str, gamma: Amount) -> _Offer:
    """Rounds of guesses until there are `gamma` tokens; of many rows all wait for the last one."""
    rounds = np.maximum(1.0, (gamma + (below.gives - 1) / 2) / below.gives)
    tokens = rounds * below.gives
    if world.rows > 1 and tier != "full":
        spread = 0.75 * (below.gives - 1) * (below.tokens + 1 - below.gives)
        deviation = np.sqrt(rounds * np.maximum(spread, 0.0)) / below.gives
        rounds = rounds + LAST_OF[min(world.rows, len(LAST_OF) - 1)] * deviation
    seconds = rounds * (below.seconds + world.cost(tier, below.width + 1))
    return _Offer(tokens, seconds, expected(world.share(tier), tokens), tokens)


@cache
def families(draft: bool, retrieval: bool) -> tuple[tuple[tuple[str, ...], tuple[np.ndarray, ...]], ...]:
    """All plans beside plain decoding that are worth a thought, by their tiers: arrays of gammas of the lower ones.

    With a draft model or not, with a middle tier where that would see less than all.
    """
    wide, narrow = np.array(WIDE), np.array(NARROW)
    low, high = (each.ravel() for each in np.meshgrid(narrow, wide))
    found: list[tuple[tuple[str, ...], tuple[np.ndarray, ...]]] = []
    if draft:
        found += [(("draft", "full"), (narrow,)), (("draft", "ngram", "full"), (narrow, narrow))]
    found.append((("ngram", "full"), (wide,)))
    if retrieval:
        found += [(("retrieval", "full"), (wide,)), (("ngram", "retrieval", "full"), (low, high))]
    if draft and retrieval:
        found.append((("draft", "retrieval", "full"), (low, high)))
        found.append((("draft", "ngram", "retrieval", "full"), (low, low, high)))
    return tuple(found)
