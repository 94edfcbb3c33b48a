"""Hindsight on n-grams: how many tokens they would have proposed in the text so far, and how many rightly.

It needs no forward pass: the tokens behind a place are known by now, and so is what n-grams would have proposed there.
So the n-gram tier is judged whether it is in use or not.
"""

from __future__ import annotations

import numpy as np

from triforce.planner.plan import Amount
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import ALONE, BEFORE_A_DRAFT

MAX_GAMMA = 16  # tokens
DECAY = 0.94  # of what was seen before, per place
PRIOR_PLACES = 2.0  # places without a match, before anything was seen
_UP_TO = np.minimum(np.arange(MAX_GAMMA + 1), np.arange(MAX_GAMMA + 1)[:, None]).astype(float)
"""[n, gamma]: the lesser."""


class NgramHindsight:
    """Sums over places, the latest ones most: of matches that suffice alone (True), and before a draft (False)."""

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
        left = DECAY**places
        self._places = left * self._places + (1 - left) / (1 - DECAY)
        for alone in (True, False):
            self._found[alone] *= left
            self._proposed[alone] *= left
            self._accepted[alone] *= left
