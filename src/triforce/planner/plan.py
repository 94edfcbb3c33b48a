"""What a plan is worth: tokens per second of a ladder, by the closed form of multi-level speculation.

With a share `a` of guesses kept, one by one and independently, verifying g guesses gives (1 - a^(g + 1)) / (1 - a)
tokens (Leviathan et al. 2023, equation 1); a tier goes round until it holds `gamma` of them, and is a guesser itself
(Sun et al. 2024, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

Cost = Callable[[str, float], float]
"""Seconds of a pass of a tier over so many tokens."""

Acceptance = Callable[[str, str], float]
"""Of the guesses of a tier that another one looked at, the share that it kept."""

WIDE = (1, 2, 3, 4, 6, 8, 10, 12, 16)
NARROW = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiers from the lowest to the full one, and how many tokens each of the lower ones gathers before it is judged."""

    tiers: tuple[str, ...] = ("full",)
    gammas: tuple[int, ...] = ()

    def __str__(self) -> str:
        guessers = [f"{tier} {gamma}" for tier, gamma in zip(self.tiers[:-1], self.gammas, strict=True)]
        return " > ".join([*guessers, self.tiers[-1]])

    def rate(self, cost: Cost, acceptance: Acceptance) -> float:
        """Tokens per second that are to be expected."""
        gammas = (*self.gammas, 1)
        tokens, seconds = float(gammas[0]), gammas[0] * cost(self.tiers[0], 1)
        for (below, tier), gamma in zip(pairwise(self.tiers), gammas[1:], strict=True):
            each = expected(acceptance(below, tier), tokens)
            rounds = max(1.0, (gamma + (each - 1) / 2) / each)
            tokens, seconds = rounds * each, rounds * (seconds + cost(tier, tokens + 1))
        return tokens / seconds


def expected(acceptance: float, guesses: float) -> float:
    """Tokens that verifying so many guesses gives, the one drawn behind them included."""
    if acceptance >= 1:
        return guesses + 1
    return float((1 - acceptance ** (guesses + 1)) / (1 - acceptance))


def plans(draft: bool, retrieval: bool) -> Iterator[Plan]:
    """All that is worth a thought: with a draft model or not, with a middle tier where that would see less than all."""
    yield Plan()
    for lowest in ("draft", "lookup") if draft else ("lookup",):
        yield from (Plan((lowest, "full"), (gamma,)) for gamma in WIDE[:6])
        if retrieval:
            yield from (Plan((lowest, "retrieval", "full"), (low, high)) for low in NARROW for high in WIDE)
    if retrieval:
        yield from (Plan(("retrieval", "full"), (gamma,)) for gamma in WIDE)
