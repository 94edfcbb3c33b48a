"""Acceptance rates of tiers, observed in these texts and in earlier ones, and of n-grams in hindsight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triforce.planner.plan import Amount
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import ALONE, BEFORE_A_DRAFT

# Acceptance before anything was observed: high, so that tiers are tried. Of n-grams: times what hindsight predicts.
PRIOR_ACCEPTANCE = {"ngram": 0.9, "draft": 0.7, "retrieval": 0.96}
TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9, 1.1)  # between them, texts are about equally easy to predict
PRIOR_WEIGHT = 4.0  # draft tokens that `PRIOR_ACCEPTANCE` counts as
HISTORY_LIMIT = 400.0  # draft tokens of earlier texts that count, at most
HISTORY_WEIGHT = 32.0  # draft tokens that earlier texts count as: the first few of a text say little of it
BUDGET_WEIGHT = 32.0  # draft tokens that the usual budget's acceptance counts as for another one
BUDGET_EXPONENT = 0.3  # rejections go with the budget to the power of minus this (docs/results/acceptance.md)
HISTORY_DECAY = 0.997  # of all texts' counts, per proposal: a tier that was unlucky is tried again some time
DECAY = 0.98  # of this text's counts, per proposal

MAX_GAMMA = 16  # tokens that n-grams propose in hindsight, at most
PLACE_DECAY = 0.94  # of what hindsight has seen before, per place
PRIOR_PLACES = 2.0  # places without a match, before anything was seen
_UP_TO = np.minimum(np.arange(MAX_GAMMA + 1), np.arange(MAX_GAMMA + 1)[:, None]).astype(float)
"""[n, gamma]: the lesser."""


class AcceptanceHistory:
    """Draft tokens accepted and rejected in all texts, by case; the latest ones count most."""

    def __init__(self, sums: dict[str, list[float]] | None = None) -> None:
        self.sums = sums or {}

    def add(self, case: str, accepted: float, rejected: float) -> None:
        """Count some draft tokens."""
        sums = self.sums.setdefault(case, [0.0, 0.0])
        sums[:] = sums[0] + accepted, sums[1] + rejected
        if (total := sum(sums)) > HISTORY_LIMIT:
            sums[:] = (each * HISTORY_LIMIT / total for each in sums)

    def fade(self, case: str, proposals: int) -> None:
        """Let a case fade, with all budgets, by so many proposals."""
        left = HISTORY_DECAY**proposals
        for key, sums in self.sums.items():
            if key == case or key.startswith(f"{case} "):
                sums[:] = left * sums[0], left * sums[1]

    def of(self, tier: str, case: str, budget_factor: float = 1.0) -> float:
        """The acceptance to expect, with so many times the usual budget."""
        accepted, rejected = self.sums.get(case, (0.0, 0.0))
        usual = (accepted + PRIOR_WEIGHT * PRIOR_ACCEPTANCE[tier]) / (accepted + rejected + PRIOR_WEIGHT)
        if budget_factor == 1.0:
            return usual
        accepted, rejected = self.sums.get(with_budget(case, budget_factor), (0.0, 0.0))
        supposed = max(0.0, 1 - (1 - usual) * float(budget_factor**-BUDGET_EXPONENT))
        return (accepted + BUDGET_WEIGHT * supposed) / (accepted + rejected + BUDGET_WEIGHT)


def with_budget(case: str, budget_factor: float) -> str:
    """The name of a case with so many times the usual budget."""
    return case if budget_factor == 1.0 else f"{case} x{budget_factor:g}"


class AcceptanceTracker:
    """Acceptance in one batch, of this mean temperature, which starts from what earlier texts have shown."""

    def __init__(self, history: AcceptanceHistory, temperature: float) -> None:
        self._history, self.temperature = history, sum(temperature > bound for bound in TEMPERATURE_BOUNDS)
        self._here: dict[str, dict[tuple[str, float], list[float]]] = {}

    def add(self, tier: str, length: int, accepted: float, rejected: float, budget_factor: float = 1.0) -> None:
        """Count a tier's draft tokens in texts of about this length, with so many times the usual budget."""
        case = self._case(tier, length)
        sums = self._here.setdefault(tier, {}).setdefault((case, budget_factor), [0.0, 0.0])
        sums[:] = sums[0] + accepted, sums[1] + rejected
        self._history.add(with_budget(case, budget_factor), accepted, rejected)

    def fade(self, length: int, proposals: int = 1) -> None:
        """Let all counts fade by so many proposals, in texts of at most this length."""
        left = DECAY**proposals
        for tier in PRIOR_ACCEPTANCE:
            self._history.fade(self._case(tier, length), proposals)
        for cases in self._here.values():
            for sums in cases.values():
                sums[:] = left * sums[0], left * sums[1]

    def of(self, tier: str, length: int, budget_factor: float = 1.0) -> float:
        """The acceptance of a tier: accepted draft tokens of those looked at, with so many times the usual budget.

        The ratio of rejections here to those elsewhere is taken to be the same for all budgets.
        """
        usual = 1 - self._history.of(tier, self._case(tier, length), budget_factor)
        rejections = expected = HISTORY_WEIGHT * usual
        for case, (accepted, rejected) in self._here.get(tier, {}).items():
            rejections += rejected
            expected += (accepted + rejected) * (1 - self._history.of(tier, *case))
        return max(0.0, 1 - usual * rejections / expected)

    def kind(self, lengths: Sequence[int]) -> str:
        """The kind of texts of these lengths: rows, temperature and size. One plan is best for texts of a kind."""
        return f"{len(lengths)} {self.temperature} {max(lengths).bit_length()}"

    def _case(self, tier: str, length: int) -> str:
        """The case that acceptance depends on; of a retrieval tier, the size of the context belongs to it."""
        return f"{tier} {self.temperature} {length.bit_length() if tier == 'retrieval' else 0}"


class NgramHindsight:
    """Sums over places, the latest ones most: of matches that suffice alone (True), and before a draft (False).

    The tokens behind a place are known by now, and so is what n-grams would have proposed there: without a pass, the
    n-gram tier is judged whether it is in use or not.
    """

    def __init__(self, ngrams: NgramProposer) -> None:
        self._ngrams = ngrams
        self.uncounted: list[tuple[int, int]] = []  # matches and hits: most are never asked about
        self._places = PRIOR_PLACES
        self._found = {True: 0.0, False: 0.0}
        self._proposed = {True: np.zeros(MAX_GAMMA + 1), False: np.zeros(MAX_GAMMA + 1)}
        self._accepted = {True: np.zeros(MAX_GAMMA + 1), False: np.zeros(MAX_GAMMA + 1)}

    def update(self, prefix: SequenceState, b: int) -> tuple[int, int]:
        """Try the new text of row b; returns at how many places, and hits: tokens that n-grams predicted there."""
        tried = list(self._ngrams.hindsight(prefix, b, MAX_GAMMA))
        self.uncounted += tried
        return len(tried), sum(hits for _, hits in tried)

    def of(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        """Tokens proposed and accepted, and the share of places with a match: see `plan.TierEstimates.hindsight`."""
        if self.uncounted:
            self._count()
        gamma = np.minimum(gamma, MAX_GAMMA)
        proposed, accepted = self._proposed[alone][gamma] / self._places, self._accepted[alone][gamma] / self._places
        return proposed, accepted, self._found[alone] / self._places

    def _count(self) -> None:
        """Count the latest places; most of them have no match."""
        empty = 0
        for match, hits in self.uncounted:
            if match < ALONE:
                empty += 1
                continue
            self._fade(empty + 1)
            empty = 0
            for alone, least in ((True, ALONE), (False, BEFORE_A_DRAFT)):
                proposed = min(MAX_GAMMA, NgramProposer.reach(match)) if match >= least else 0
                self._found[alone] += proposed > 0
                self._proposed[alone] += _UP_TO[proposed]
                self._accepted[alone] += _UP_TO[min(hits, proposed)]
        self._fade(empty)
        self.uncounted.clear()

    def _fade(self, places: int) -> None:
        """Let all sums fade by so many places."""
        left = PLACE_DECAY**places
        self._places = left * self._places + (1 - left) / (1 - PLACE_DECAY)
        for alone in (True, False):
            self._found[alone] *= left
            self._proposed[alone] *= left
            self._accepted[alone] *= left
