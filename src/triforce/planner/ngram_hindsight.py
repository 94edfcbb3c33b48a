"""How well guesses from the text itself would have fared, tried on the text as it came.

It needs no pass: what followed a place is known by now, and so is what lookup would have guessed there. So lookup is
judged whether it is in use or not.
"""

from __future__ import annotations

import numpy as np

from triforce.planner.plan import Amount
from triforce.speculation import NgramProposer, SequenceState
from triforce.speculation.ngram import ALONE, BEFORE_A_DRAFT

MOST = 16  # guesses
FADE = 0.94  # of what was seen before, per place
BELIEF = 2.0  # places without a guess, before anything was seen
_UP_TO = np.minimum(np.arange(MOST + 1), np.arange(MOST + 1)[:, None]).astype(float)
"""[n, gamma]: the lesser."""


class NgramHindsight:
    """Sums over places, the latest ones most: of matches that count alone, and of those that count before a draft."""

    def __init__(self, lookup: NgramProposer) -> None:
        self._lookup = lookup
        self._heard: list[tuple[int, int]] = []  # places that are not counted yet: most are never asked about
        self._places = BELIEF
        self._found = {True: 0.0, False: 0.0}
        self._made = {True: np.zeros(MOST + 1), False: np.zeros(MOST + 1)}
        self._kept = {True: np.zeros(MOST + 1), False: np.zeros(MOST + 1)}

    def listen(self, prefix: SequenceState, b: int) -> tuple[int, int]:
        """Try what has been written in row b since the last time: at how many places, and how many tokens it told."""
        news = list(self._lookup.hindsight(prefix, b, MOST))
        self._heard += news
        return len(news), sum(run for _, run in news)

    def of(self, gamma: Amount, alone: bool) -> tuple[Amount, Amount, float]:
        """As `plan.TierEstimates.echo` says."""
        if self._heard:
            self._count()
        gamma = np.minimum(gamma, MOST)
        made, kept = self._made[alone][gamma] / self._places, self._kept[alone][gamma] / self._places
        return made, kept, self._found[alone] / self._places

    def _count(self) -> None:
        """See the latest places; at most of them there was nothing to guess by."""
        empty = 0
        for match, run in self._heard:
            if match < ALONE:
                empty += 1
                continue
            self._fade(empty + 1)
            empty = 0
            for alone, least in ((True, ALONE), (False, BEFORE_A_DRAFT)):
                guesses = min(MOST, NgramProposer.reach(match)) if match >= least else 0
                self._found[alone] += guesses > 0
                self._made[alone] += _UP_TO[guesses]
                self._kept[alone] += _UP_TO[min(run, guesses)]
        self._fade(empty)
        self._heard.clear()

    def _fade(self, places: int) -> None:
        """So many places more."""
        left = FADE**places
        self._places = left * self._places + (1 - left) / (1 - FADE)
        for alone in (True, False):
            self._found[alone] *= left
            self._made[alone] *= left
            self._kept[alone] *= left
