"""Which share of a tier's guesses was kept, in this text and in those before it."""

from __future__ import annotations

EXPECTED = {"draft": 0.7, "retrieval": 0.96}  # shares kept, before anything was seen: high, so that they are tried
HEATS = (0.0, 0.5, 0.9, 1.1)  # temperatures at which texts differ in how easily they are guessed
BELIEF = 4.0  # guesses' worth of `EXPECTED`
REMEMBERED = 100.0  # guesses of earlier texts, at most
PRIOR = 8.0  # guesses' worth of what earlier texts say
FADE = 0.98  # of what was seen in this text, per proposal


class Shares:
    """Sums of guesses kept and refused, by circumstances, of all texts; the latest ones count most."""

    def __init__(self, sums: dict[str, list[float]] | None = None) -> None:
        self.sums = sums or {}

    def add(self, about: str, kept: float, refused: float) -> None:
        """What happened to some guesses."""
        sums = self.sums.setdefault(about, [0.0, 0.0])
        sums[:] = sums[0] + kept, sums[1] + refused
        if (total := sum(sums)) > REMEMBERED:
            sums[:] = (each * REMEMBERED / total for each in sums)

    def of(self, tier: str, about: str) -> float:
        """The share that is to be expected."""
        kept, refused = self.sums.get(about, (0.0, 0.0))
        return (kept + BELIEF * EXPECTED[tier]) / (kept + refused + BELIEF)


class Watch:
    """The shares of one batch, of which what others saw is the beginning.

    heat: the temperature that its texts are sampled with.
    """

    def __init__(self, shares: Shares, heat: float) -> None:
        self._shares, self._heat = shares, sum(heat > bound for bound in HEATS)
        self._seen: dict[str, list[float]] = {}

    def add(self, tier: str, length: int, kept: int, refused: int) -> None:
        """What happened to some guesses in texts of about this length."""
        sums = self._seen.setdefault(tier, [0.0, 0.0])
        sums[:] = sums[0] + kept, sums[1] + refused
        self._shares.add(self._about(tier, length), kept, refused)

    def fade(self) -> None:
        """A proposal is over."""
        for sums in self._seen.values():
            sums[:] = FADE * sums[0], FADE * sums[1]

    def share(self, tier: str, length: int) -> float:
        """The share of a tier's guesses that is kept, of those looked at."""
        kept, refused = self._seen.get(tier, (0.0, 0.0))
        before = self._shares.of(tier, self._about(tier, length))
        return (kept + PRIOR * before) / (kept + refused + PRIOR)

    def _about(self, tier: str, length: int) -> str:
        """What a share depends on: how much a retrieval tier leaves out, too."""
        return f"{tier} {self._heat} {length.bit_length() if tier == 'retrieval' else 0}"
