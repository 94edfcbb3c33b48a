"""Acceptance of tiers as a belief: what earlier texts showed, what this one shows, and how far both may be off.

A belief is a Beta distribution over the share of a tier's draft tokens that is accepted. Earlier texts of the case are
its prior, which counts as few tokens, because texts differ; this text's tokens are added, and fade.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triforce.planner.planner_config import CONFIG
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import ALONE, BEFORE_A_DRAFT

# Acceptance before anything was observed: high, so that tiers are tried. Of n-grams: times what hindsight predicts.
PRIOR_ACCEPTANCE = {"ngram": 0.9, "draft": 0.65, "retrieval": 0.9}
TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9, 1.1)  # between them, texts are about equally easy to predict

MAX_GAMMA = 16  # tokens that n-grams propose in hindsight, at most
KNOWN = 8  # tokens behind a place that are compared: where all are right, as many as were proposed are taken to be
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
        if (total := sum(sums)) > CONFIG.history_limit:
            sums[:] = (each * CONFIG.history_limit / total for each in sums)

    def fade(self, proposals: int) -> None:
        """Let all cases fade by so many proposals."""
        left = (1 - 1 / CONFIG.history_memory) ** proposals
        for sums in self.sums.values():
            sums[:] = left * sums[0], left * sums[1]

    def of(self, tier: str, case: str, budget_factor: float = 1.0) -> tuple[float, float]:
        """The acceptance to expect in the mean of texts, with so many times the usual budget; and tokens behind it."""
        accepted, rejected = self.sums.get(case, (0.0, 0.0))
        tokens = accepted + rejected + CONFIG.prior_tokens
        usual = (accepted + CONFIG.prior_tokens * PRIOR_ACCEPTANCE[tier]) / tokens
        if budget_factor == 1.0:
            return usual, tokens
        accepted, rejected = self.sums.get(with_budget(case, budget_factor), (0.0, 0.0))
        supposed = max(0.0, 1 - (1 - usual) * float(budget_factor**-CONFIG.budget_exponent))
        weight = min(CONFIG.budget_tokens, tokens)
        return (accepted + weight * supposed) / (accepted + rejected + weight), accepted + rejected + weight


def with_budget(case: str, budget_factor: float) -> str:
    """The name of a case with so many times the usual budget."""
    return case if budget_factor == 1.0 else f"{case} x{budget_factor:g}"


class AcceptanceTracker:
    """Beliefs about acceptance in one batch, of this mean temperature."""

    def __init__(self, history: AcceptanceHistory, temperature: float) -> None:
        self._history, self.temperature = history, sum(temperature > bound for bound in TEMPERATURE_BOUNDS)
        self._here: dict[str, dict[tuple[str, float], list[float]]] = {}

    def add(self, tier: str, length: int, accepted: float, rejected: float, budget_factor: float = 1.0) -> None:
        """Count a tier's draft tokens in texts of about this length, with so many times the usual budget."""
        case = self._case(tier, length)
        sums = self._here.setdefault(tier, {}).setdefault((case, budget_factor), [0.0, 0.0])
        sums[:] = sums[0] + accepted, sums[1] + rejected
        self._history.add(with_budget(case, budget_factor), accepted, rejected)

    def fade(self, proposals: int) -> None:
        """Let what this text showed fade by so many proposals."""
        self._history.fade(proposals)
        left = (1 - 1 / CONFIG.text_memory) ** proposals
        for cases in self._here.values():
            for sums in cases.values():
                sums[:] = left * sums[0], left * sums[1]

    def of(self, tier: str, length: int, budget_factor: float = 1.0) -> tuple[float, float]:
        """The acceptance of a tier, and its standard deviation.

        The ratio of rejections here to those elsewhere is taken to be the same for all budgets.
        """
        mean, tokens = self._history.of(tier, self._case(tier, length), budget_factor)
        usual, prior = 1 - mean, min(tokens, CONFIG.history_tokens)
        rejections = expected = prior * usual
        for case, (accepted, rejected) in self._here.get(tier, {}).items():
            rejections += rejected
            expected += (accepted + rejected) * (1 - self._history.of(tier, *case)[0])
            prior += accepted + rejected
        found = min(1.0, max(0.0, 1 - usual * rejections / max(expected, 1e-9)))
        shrunk = (found * prior + 0.5) / (prior + 1)  # of none in few, some may still come
        return found, float((shrunk * (1 - shrunk) / (prior + 1)) ** 0.5)

    def tokens(self, tier: str) -> float:
        """Draft tokens of this text that count."""
        return sum(sum(sums) for sums in self._here.get(tier, {}).values())

    def kind(self, lengths: Sequence[int]) -> str:
        """The kind of texts of these lengths: rows, temperature and size. One plan is best for texts of a kind."""
        return f"{len(lengths)} {self.temperature} {max(lengths).bit_length()}"

    def _case(self, tier: str, length: int) -> str:
        """The case that acceptance depends on; of a retrieval tier, the size of the context belongs to it."""
        return f"{tier} {self.temperature} {length.bit_length() if tier == 'retrieval' else 0}"


class NgramHindsight:
    """Means over places of the text, the latest ones most, of n-grams before a draft (0) and alone (1).

    The tokens behind a place are known by now, and so is what n-grams would have proposed there: without a pass, the
    n-gram tier is judged whether it is in use or not.
    """

    def __init__(self, ngrams: NgramProposer) -> None:
        self._ngrams = ngrams
        self.uncounted: list[tuple[int, int]] = []  # matches and hits: most are never asked about
        self._places, self._found_A = PRIOR_PLACES, np.zeros(2)
        self._sums_2AG = np.zeros((2, 2, MAX_GAMMA + 1))  # tokens proposed, and accepted

    def update(self, prefix: SequenceState, b: int) -> int:
        """Try the new text of row b; returns how many of its tokens n-grams predicted."""
        tried = list(self._ngrams.hindsight(prefix, b, KNOWN))
        self.uncounted += tried
        return sum(hits for _, hits in tried)

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens proposed and accepted (A, G), and the share of places with a match (A,): see `Estimates`."""
        if self.uncounted:
            self._count()
        proposed_AG, accepted_AG = self._sums_2AG / self._places
        return proposed_AG, accepted_AG, self._found_A / self._places

    def _count(self) -> None:
        """Count the latest places; most of them have no match."""
        empty = 0
        for match, hits in self.uncounted:
            if match < ALONE:
                empty += 1
                continue
            self._fade(empty + 1)
            empty = 0
            run = hits if hits < KNOWN else MAX_GAMMA
            for a, least in enumerate((BEFORE_A_DRAFT, ALONE)):
                proposed = min(MAX_GAMMA, NgramProposer.reach(match)) if match >= least else 0
                self._found_A[a] += proposed > 0
                self._sums_2AG[:, a] += _UP_TO[[proposed, min(run, proposed)]]
        self._fade(empty)
        self.uncounted.clear()

    def _fade(self, places: int) -> None:
        """Let all sums fade by so many places."""
        left = PLACE_DECAY**places
        self._places = left * self._places + (1 - left) / (1 - PLACE_DECAY)
        self._found_A *= left
        self._sums_2AG *= left
