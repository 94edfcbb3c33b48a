"""Guesses copied from the text itself: what followed the longest end of it that occurred before.

The idea is prompt lookup decoding (Saxena 2023), with longer guesses behind longer matches as in SuffixDecoding (Oliaro
et al. 2024, arXiv 2411.04975). The law of such a guess is a point mass, so all couplings stay exact.
Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from triforce.ragged import Bools, Ints, ints
from triforce.speculation.counters import Counters
from triforce.speculation.draft import Draft, SequenceState
from triforce.speculation.ngram_index import NgramIndex
from triforce.speculation.protocols import Grant, TokenSampler, all_of_it
from triforce.speculation.tier import Tier

ALONE, BEFORE_A_DRAFT = 3, 5
"""Tokens of the shortest match that pays. By `python -m benchmarks.lookup` the target gives what followed one of 1 to
5 tokens the probability 0.11, 0.29, 0.47, 0.56 and 0.77; of the draft's guesses it would keep 0.61 in the first of
these places, 0.55 in the fourth, 0.42 in the fifth. Without a draft a guess costs a column of a pass, and no less."""

BELIEF = 4.0  # tokens kept, and refused, before anything was seen
FAR = 64  # tokens that a pass of a draft may be behind; further behind it catches up row by row
STRIDE, TRIED = 8, 64  # tokens between two places that are tried in hindsight; of the prompt's end that is tried


class NgramProposer:
    """Guesses from the text where it repeats itself; elsewhere the draft below guesses, or nobody.

    The guess is half as long as the match, which is about how much of it is kept, and at most `gamma` tokens; it may
    run into itself, as copies do in LZ77. Where a row's draft has better odds of being kept, a match has to be as many
    times longer: so lookup retires from a text in which it does not pay, and comes back when that repeats itself.
    """

    name = "ngram"

    def __init__(self, rows: int, gamma: int = 2, below: Tier[Any] | None = None, least: int = 0) -> None:
        self.gamma, self.below = gamma, below
        self._least = least
        self.level: int = below.level + 1 if below else 0
        self.counters = Counters(rows)
        self._grams = [NgramIndex(self.least) for _ in range(rows)]
        self._tried = [0] * rows

    @property
    def least(self) -> int:
        """Tokens of the shortest match that counts."""
        return self._least or (BEFORE_A_DRAFT if self.below else ALONE)

    @staticmethod
    def reach(match: int) -> int:
        """Guesses behind a match of so many tokens."""
        return max(1, match // 2)

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        started = perf_counter()
        guesses = [self._guess(prefix, b, least) for b, least in enumerate(np.where(live_B, self._needed_B(), np.inf))]
        counts_B = ints([len(guess) for guess in guesses])
        law_size = sampling.coupling.law_size(sampling.vocab_size)
        found = Draft.empty(len(guesses), law_size)
        if counts_B.any():  # seldom in most texts, of which this is asked often
            tokens_BK = np.zeros((len(guesses), counts_B.max()), dtype=np.int64)
            for row, guess in zip(tokens_BK, guesses, strict=True):
                row[: len(guess)] = guess
            laws_BKV = F.one_hot(torch.from_numpy(tokens_BK), sampling.vocab_size)[..., :law_size].double()
            found = Draft(tokens_BK, laws_BKV, np.full_like(tokens_BK, self.level), counts_B)
        self.counters.passed(live_B, perf_counter() - started)
        rest_B = live_B & (counts_B == 0)
        if self.below is None or not rest_B.any():
            return found
        self.below.catch_up(prefix, rest_B & (prefix.lengths_B - self.below.cache.lengths_B > FAR))
        return found.then(self.below.propose(prefix, sampling, rest_B), rest_B)

    def judged(self, guess: Draft, kept_B: Ints, live_B: Bools) -> None:
        own_B = live_B & (guess.origins_BK[:, :1] == self.level).any(1) if self.below else live_B
        self.counters.judged(guess.counts_B, kept_B, own_B)
        if self.below:
            self.below.judged(guess, kept_B, live_B & ~own_B)

    def rewind(self, prefix: SequenceState) -> None:
        """See all but the last token, which may be another one than was seen there."""
        for grams, length in zip(self._grams, prefix.lengths_B.tolist(), strict=True):
            grams.forget(length - 1)
        if self.below:
            self.below.rewind(prefix)

    def prefill(self, prefix: SequenceState, b: int, length: int, *, grant: Grant = all_of_it) -> Iterator[int]:
        """Read row b up to `length` tokens: 128K in a quarter of a second. A row left out is read when it is needed."""
        started = perf_counter()
        self._grams[b].read(prefix.ids_BS[b, :length])
        self._tried[b] = max(1, length - TRIED)
        self.counters.prefill_seconds_B[b] += perf_counter() - started
        yield length

    def aside(self, b: int) -> tuple[Any, ...]:
        return self._grams[b], self._tried[b], self.counters.aside(b)

    def bring_back(self, b: int, held: tuple[Any, ...]) -> None:
        self._grams[b], self._tried[b], counts = held
        self.counters.bring_back(b, counts)

    def select(self, rows: Sequence[int]) -> None:
        self._grams, self._tried = [self._grams[b] for b in rows], [self._tried[b] for b in rows]
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        self._grams += other._grams
        self._tried += other._tried
        self.counters.join(other.counters)

    def hindsight(self, prefix: SequenceState, b: int, most: int) -> Iterator[tuple[int, int]]:
        """At places of row b that were not tried yet: how long the match was, and how many tokens it told rightly.

        A place is tried once `most` tokens stand behind it. The text is read up to the last such place.
        """
        text_S, grams = prefix.ids_BS[b, : prefix.lengths_B[b]], self._grams[b]
        places = range(self._tried[b], len(text_S) - most + 1, STRIDE)
        if places:
            grams.read(text_S[: places[-1]])
            self._tried[b] = places[-1] + STRIDE
        for place in places:
            match, after = grams.match(text_S[:place])
            run = 0
            if match:
                wrong = text_S[after : after + most] != text_S[place : place + most]  # what is beyond `place` is right
                run = int(wrong.argmax()) if wrong.any() else most
            yield match, run

    def _guess(self, prefix: SequenceState, b: int, least: float) -> Ints:
        text_S = prefix.ids_BS[b, : prefix.lengths_B[b]]
        if least == np.inf:
            return text_S[:0]
        self._grams[b].read(text_S)
        length, after = self._grams[b].match(text_S)
        return np.resize(text_S[after:], min(self.gamma, self.reach(length)) if length >= least else 0)

    def _needed_B(self) -> np.ndarray:
        """Tokens that a match must have, per row."""
        if self.below is None:
            return np.full(len(self._grams), self.least)
        own_B, drafts_B = (
            (each.accepted_B + BELIEF) / (each.refused_B + BELIEF) for each in (self.counters, self.below.counters)
        )
        return self.least * np.maximum(1, drafts_B / own_B)
