"""Acceptance of tiers as a belief: what earlier texts showed, what this one shows, and how far both may be off.

A belief is a Beta distribution over the share of a tier's draft tokens that is accepted. Earlier texts of the case are
its prior, which counts as few tokens, because texts differ; this text's tokens are added, and fade.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triforce.planner.planner_config import CONFIG
from triforce.ragged import Ints
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import ALONE, BEFORE_A_DRAFT

# Acceptance before anything was observed: high, so that tiers are tried. Of n-grams: times what hindsight predicts.
PRIOR_ACCEPTANCE = {"ngram": 0.9, "draft": 0.65, "retrieval": 0.9}
TEMPERATURE_BOUNDS = (0.0, 0.5, 0.9, 1.1)  # between them, texts are about equally easy to predict

MAX_GAMMA = 16  # tokens that n-grams propose in hindsight, at most
KNOWN = 8  # tokens behind a place that are compared: where all are right, as many as were proposed are taken to be
PLACE_DECAY = 0.94  # of what hindsight has seen before, per place
PRIOR_PLACES = 2.0  # places without a match, before anything was seen


class AcceptanceHistory:
    """Draft tokens accepted and rejected in all texts, by case; the latest ones count most."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, case: str, accepted: float, rejected: float) -> None:
        """Count some draft tokens."""
        sums = np.add(self.sums.get(case, (0.0, 0.0)), (accepted, rejected))
        self.sums[case] = (sums * min(1.0, CONFIG.history_limit / max(sums.sum(), 1.0))).tolist()

    def fade(self, proposals: int) -> None:
        """Let all cases fade by so many proposals."""
        left = (1 - 1 / CONFIG.history_memory) ** proposals
        self.sums = {case: [left * accepted, left * rejected] for case, (accepted, rejected) in self.sums.items()}

    def of(self, tier: str, case: str, budget_factor: float = 1.0) -> tuple[float, float]:
        """The acceptance to expect in the mean of texts, with so many times the usual budget; and tokens behind it."""
        mean, tokens = self._mean(case, PRIOR_ACCEPTANCE[tier], CONFIG.prior_tokens)
        if budget_factor != 1.0:
            supposed = max(0.0, 1 - (1 - mean) * budget_factor**-CONFIG.budget_exponent)
            mean, tokens = self._mean(with_budget(case, budget_factor), supposed, min(CONFIG.budget_tokens, tokens))
        return mean, tokens

    def _mean(self, case: str, prior: float, weight: float) -> tuple[float, float]:
        """The acceptance in a case, where so many tokens of `prior` acceptance come on top; and all tokens."""
        accepted, rejected = self.sums.get(case, (0.0, 0.0))
        tokens = accepted + rejected + weight
        return (accepted + weight * prior) / tokens, tokens


def with_budget(case: str, budget_factor: float) -> str:
    """The name of a case with so many times the usual budget."""
    return case if budget_factor == 1.0 else f"{case} x{budget_factor:g}"


class AcceptanceTracker:
    """Beliefs about acceptance in one batch, of this mean temperature."""

    def __init__(self, history: AcceptanceHistory, temperature: float) -> None:
        self._history, self.temperature = history, sum(temperature > bound for bound in TEMPERATURE_BOUNDS)
        self._here: dict[str, dict[tuple[str, float], np.ndarray]] = {}
        """By tier, case and times the usual budget: draft tokens of this text that were accepted, and rejected."""

    def add(self, tier: str, length: int, accepted: float, rejected: float, budget_factor: float = 1.0) -> None:
        """Count a tier's draft tokens in texts of about this length, with so many times the usual budget."""
        case, news = self._case(tier, length), np.array([accepted, rejected])
        here = self._here.setdefault(tier, {})
        here[case, budget_factor] = here.get((case, budget_factor), 0.0) + news
        self._history.add(with_budget(case, budget_factor), accepted, rejected)

    def fade(self, proposals: int) -> None:
        """Let what this text showed fade by so many proposals."""
        self._history.fade(proposals)
        for sums in (sums for cases in self._here.values() for sums in cases.values()):
            sums *= (1 - 1 / CONFIG.text_memory) ** proposals

    def of(self, tier: str, length: int, budget_factor: float = 1.0) -> tuple[float, float]:
        """The acceptance of a tier, and its standard deviation.

        The ratio of rejections here to those elsewhere is taken to be the same for all budgets.
        """
        mean, tokens = self._history.of(tier, self._case(tier, length), budget_factor)
        usual, prior, here = 1 - mean, min(tokens, CONFIG.history_tokens), self._here.get(tier, {})
        expected = sum(sums.sum() * (1 - self._history.of(tier, *case)[0]) for case, sums in here.items())
        rejected, count = sum(sums[1] for sums in here.values()), prior + self.tokens(tier)
        found = 1 - usual * (rejected + prior * usual) / max(expected + prior * usual, 1e-9)
        found = float(min(1.0, max(0.0, found)))
        shrunk = (found * count + 0.5) / (count + 1)  # of none in few, some may still come
        return found, float((shrunk * (1 - shrunk) / (count + 1)) ** 0.5)

    def tokens(self, tier: str) -> float:
        """Draft tokens of this text that count."""
        return float(sum(sums.sum() for sums in self._here.get(tier, {}).values()))

    def kind(self, lengths: Sequence[int]) -> str:
        """The kind of texts of these lengths: rows, temperature and size. One plan is best for texts of a kind."""
        return f"{len(lengths)} {self.temperature} {max(lengths).bit_length()}"

    def _case(self, tier: str, length: int) -> str:
        """The case that acceptance depends on; of a retrieval tier, the size of the context belongs to it."""
        return f"{tier} {self.temperature} {length.bit_length() if tier == 'retrieval' else 0}"


class NgramHindsight:
    """Means over places of the text, the latest ones most, of n-grams before a draft (0) and alone (1).

    The tokens behind a place are known by now, and so is what n-grams would have proposed there: without a pass, the
    n-gram tier is judged whether it is in use or not. Shape suffixes are those of `plan`, and P places.
    """

    def __init__(self, ngrams: NgramProposer) -> None:
        self._ngrams = ngrams
        self.uncounted: list[tuple[int, int]] = []  # matches and hits: most are never asked about
        self._places, self._found_A = PRIOR_PLACES, np.zeros(2)
        self._proposed_AG, self._accepted_AG = np.zeros((2, 2, MAX_GAMMA + 1))

    def update(self, prefix: SequenceState, b: int) -> int:
        """Try the new text of row b; returns how many of its tokens n-grams predicted."""
        tried = list(self._ngrams.hindsight(prefix, b, KNOWN))
        self.uncounted += tried
        return sum(hits for _, hits in tried)

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens proposed and accepted (A, G), and the share of places with a match (A,): see `Estimates`."""
        if self.uncounted:
            self._count(*np.array(self.uncounted).T)
            self.uncounted.clear()
        return self._proposed_AG / self._places, self._accepted_AG / self._places, self._found_A / self._places

    def _count(self, match_P: Ints, hits_P: Ints) -> None:
        """Count the latest places."""
        weight_P = PLACE_DECAY ** np.arange(len(match_P))[::-1]
        found_PA = match_P[:, None] >= (BEFORE_A_DRAFT, ALONE)
        reach_P = np.array([NgramProposer.reach(match) for match in match_P.tolist()])
        proposed_PAG = found_PA[..., None] * np.minimum(reach_P[:, None, None], np.arange(MAX_GAMMA + 1))
        accepted_PAG = np.minimum(proposed_PAG, np.where(hits_P < KNOWN, hits_P, MAX_GAMMA)[:, None, None])
        left = PLACE_DECAY ** len(match_P)
        self._places = left * self._places + weight_P.sum()
        self._found_A = left * self._found_A + weight_P @ found_PA
        self._proposed_AG = left * self._proposed_AG + np.tensordot(weight_P, proposed_PAG, 1)
        self._accepted_AG = left * self._accepted_AG + np.tensordot(weight_P, accepted_PAG, 1)
