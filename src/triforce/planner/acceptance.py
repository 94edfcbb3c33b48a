"""Which share of a tier's guesses was kept, in this text and in those before it."""

from __future__ import annotations

from collections.abc import Sequence

# Shares kept, before anything was seen: high, so that they are tried. Of lookup it is that of what an echo predicts.
EXPECTED = {"ngram": 0.9, "draft": 0.7, "retrieval": 0.96}
HEATS = (0.0, 0.5, 0.9, 1.1)  # temperatures at which texts differ in how easily they are guessed
BELIEF = 4.0  # guesses' worth of `EXPECTED`
REMEMBERED = 400.0  # guesses of earlier texts, at most
PRIOR = 32.0  # guesses' worth of what earlier texts say: a text's first few say little of it
UNTRIED = 32.0  # guesses' worth of what another budget tells of one
FEWER = 0.3  # refusals go with the budget to the power of minus this (docs/results/acceptance.md)
FORGOTTEN = 0.997  # of what all texts say, per proposal: who was unlucky, and is not tried since, is tried again
FADE = 0.98  # of what was seen in this text, per proposal


class AcceptanceHistory:
    """Sums of guesses kept and refused, by circumstances, of all texts; the latest ones count most."""

    def __init__(self, sums: dict[str, list[float]] | None = None) -> None:
        self.sums = sums or {}

    def add(self, about: str, kept: float, refused: float) -> None:
        """What happened to some guesses."""
        sums = self.sums.setdefault(about, [0.0, 0.0])
        sums[:] = sums[0] + kept, sums[1] + refused
        if (total := sum(sums)) > REMEMBERED:
            sums[:] = (each * REMEMBERED / total for each in sums)

    def forget(self, about: str, proposals: int) -> None:
        """So many proposals in these circumstances are over."""
        left = FORGOTTEN**proposals
        for key, sums in self.sums.items():
            if key == about or key.startswith(f"{about} "):
                sums[:] = left * sums[0], left * sums[1]

    def of(self, tier: str, about: str, times: float = 1.0) -> float:
        """The share that is to be expected, with so many times the budget."""
        kept, refused = self.sums.get(about, (0.0, 0.0))
        usual = (kept + BELIEF * EXPECTED[tier]) / (kept + refused + BELIEF)
        if times == 1.0:
            return usual
        kept, refused = self.sums.get(with_budget(about, times), (0.0, 0.0))
        return (kept + UNTRIED * max(0.0, 1 - (1 - usual) * float(times**-FEWER))) / (kept + refused + UNTRIED)


def with_budget(about: str, times: float) -> str:
    """The same circumstances with so many times the budget."""
    return about if times == 1.0 else f"{about} x{times:g}"


class AcceptanceTracker:
    """The shares of one batch, of which what others saw is the beginning.

    heat: the temperature that its texts are sampled with.
    """

    def __init__(self, shares: AcceptanceHistory, heat: float) -> None:
        self._shares, self._heat = shares, sum(heat > bound for bound in HEATS)
        self._seen: dict[str, dict[tuple[str, float], list[float]]] = {}

    def add(self, tier: str, length: int, kept: float, refused: float, times: float = 1.0) -> None:
        """What happened to some guesses in texts of about this length, made with so many times the budget."""
        about = self._about(tier, length)
        sums = self._seen.setdefault(tier, {}).setdefault((about, times), [0.0, 0.0])
        sums[:] = sums[0] + kept, sums[1] + refused
        self._shares.add(with_budget(about, times), kept, refused)

    def fade(self, length: int, proposals: int = 1) -> None:
        """So many proposals are over, of texts of at most this length."""
        left = FADE**proposals
        for tier in EXPECTED:
            self._shares.forget(self._about(tier, length), proposals)
        for seen in self._seen.values():
            for sums in seen.values():
                sums[:] = left * sums[0], left * sums[1]

    def share(self, tier: str, length: int, times: float = 1.0) -> float:
        """The share of a tier's guesses that is kept, of those looked at, with so many times the budget.

        How many more or fewer are refused here than elsewhere is a trait of the texts, whatever the budget.
        """
        usual = 1 - self._shares.of(tier, self._about(tier, length), times)
        refused = foreseen = PRIOR * usual
        for case, (kept, lost) in self._seen.get(tier, {}).items():
            refused += lost
            foreseen += (kept + lost) * (1 - self._shares.of(tier, *case))
        return max(0.0, 1 - usual * refused / foreseen)

    def kind(self, lengths: Sequence[int]) -> str:
        """What texts of these lengths have in common with others, for which the same plan is best."""
        return f"{len(lengths)} {self._heat} {max(lengths).bit_length()}"

    def _about(self, tier: str, length: int) -> str:
        """What a share depends on: how much a retrieval tier leaves out, too."""
        return f"{tier} {self._heat} {length.bit_length() if tier == 'retrieval' else 0}"
