"""NgramProposer: draft tokens copied from the text itself, which followed its longest end that occurred before.

The idea is prompt lookup decoding (Saxena 2023), with longer proposals behind longer matches as in SuffixDecoding
(Oliaro et al. 2024, arXiv 2411.04975). The distribution of such a token is a point mass, so all couplings stay exact.
Shape suffixes: B rows, S tokens of a text, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch

from triforce.ragged import Bools, Ints, ints
from triforce.speculation.draft import Counters, Draft, SequenceState
from triforce.speculation.protocols import Grant, TokenSampler, grant_all
from triforce.speculation.tier import Tier

ALONE, BEFORE_A_DRAFT = 3, 5
"""Tokens of the shortest match that pays. By `python -m benchmarks.lookup` the target gives what followed one of 1 to
5 tokens the probability 0.11, 0.29, 0.47, 0.56 and 0.77; of the draft's tokens it would accept 0.61 in the first of
these places, 0.55 in the fourth, 0.42 in the fifth. Without a draft a draft token costs a column of a pass, no less."""

PRIOR = 4.0  # tokens accepted, and proposals rejected, before anything was seen
FAR = 64  # tokens that a pass of a draft may be behind; further behind it catches up row by row
STRIDE, TRIED = 8, 64  # tokens between two places that are tried in hindsight; of the prompt's end that is tried
LONGEST = 64  # tokens of a match that are looked at beyond the n-gram
_BACK = np.arange(1, LONGEST + 1)
OCCURRENCES = 16  # occurrences, the latest first: a frequent n-gram has thousands in a long text


class NgramIndex:
    """The n-grams of one text that grows, and may be cut back: a dictionary and two lists, some 150 bytes a token.

    Place i is where the n-gram of tokens [i, i + n) starts. A token takes constant time, to read and to forget.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._latest: dict[bytes, int] = {}
        self._grams: list[bytes] = []
        self._before: list[int] = []  # the place before each where its n-gram occurred; -1: there is none

    def read(self, text_S: Ints) -> None:
        """Read this text, which begins with what was read before."""
        start = len(self._grams)
        tokens = text_S[start:].astype(np.int32)
        raw = tokens.tobytes()
        unit = tokens.itemsize
        for place, at in enumerate(range(0, len(raw) - (self.n - 1) * unit, unit), start):
            gram = raw[at : at + self.n * unit]
            self._before.append(self._latest.get(gram, -1))
            self._grams.append(gram)
            self._latest[gram] = place

    def forget(self, length: int) -> None:
        """Forget all but the first `length` tokens, as if no others had been read."""
        for _ in range(len(self._grams) - max(0, length - self.n + 1)):
            gram = self._grams.pop()
            before = self._before.pop()
            if before < 0:
                del self._latest[gram]
            else:
                self._latest[gram] = before

    def match(self, text_S: Ints) -> tuple[int, int]:
        """Find the longest end of a text that occurred before, of at least n tokens; the latest of equals.

        The text is one that what was read begins with; of many occurrences the latest are tried. Returns the length of
        the match and the place behind it; (0, 0) without one.
        """
        places = list[int]()
        end = len(text_S) - self.n
        place = self._before[end] if end >= 0 else -1
        while place >= 0 and len(places) < OCCURRENCES:
            places.append(place)
            place = self._before[place]
        if not places:
            return 0, 0
        place_O1 = np.array(places)[:, None]  # all at once, as each call of numpy takes longer than what it computes
        here_L, there_OL = (text_S[np.maximum(at - _BACK, 0)] for at in (end, place_O1))
        differ_OL = (here_L != there_OL) | (place_O1 < _BACK)
        length_O = np.where(differ_OL.any(1), differ_OL.argmax(1), LONGEST)
        best = int(length_O.argmax())
        return self.n + int(length_O[best]), places[best] + self.n


class NgramProposer:
    """Proposes tokens from the text where it repeats itself; elsewhere the draft below does, if there is one.

    A proposal is half as long as the match, about as much as is accepted of it, and at most `gamma` tokens. It may run
    into itself, as copies do in LZ77. Where the draft's tokens have better odds of being accepted, a match has to be as
    many times longer: so n-grams retire from a text in which they do not pay, and come back when it repeats itself.
    """

    name = "ngram"

    def __init__(self, rows: int, gamma: int = 2, below: Tier[Any] | None = None, least: int = 0) -> None:
        self.gamma = gamma
        self.below = below
        self._least = least
        self.level: int = below.level + 1 if below else 0
        self.counters = Counters(rows)
        self.indexes = [NgramIndex(self.least) for _ in range(rows)]
        self._tried = [(0, 0)] * rows
        """Of each row the place that is tried next in hindsight, and where its prompt ends."""

    @property
    def least(self) -> int:
        """Tokens of the shortest match that counts."""
        return self._least or (BEFORE_A_DRAFT if self.below else ALONE)

    @staticmethod
    def reach(match: int) -> int:
        """Draft tokens behind a match of so many tokens."""
        return max(1, match // 2)

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Propose tokens for the live rows, from n-grams or by the draft below: none where neither has any."""
        started = perf_counter()
        guesses = [self.guess(prefix, b, least) for b, least in enumerate(np.where(live_B, self._needed_B(), np.inf))]
        counts_B = ints([len(guess) for guess in guesses])
        probs_size = sampling.probs_size
        found = Draft.empty(len(guesses), probs_size)
        if counts_B.any():  # seldom in most texts, of which this is asked often
            tokens_BK = np.zeros((len(guesses), counts_B.max()), dtype=np.int64)
            for row, guess in zip(tokens_BK, guesses, strict=True):
                row[: len(guess)] = guess
            probs_BKV = torch.zeros(*tokens_BK.shape, probs_size, dtype=torch.float64)
            if probs_size:
                probs_BKV.scatter_(2, torch.from_numpy(tokens_BK)[..., None], 1.0)
            found = Draft(tokens_BK, probs_BKV, np.full_like(tokens_BK, self.level), counts_B)
        self.counters.record_passes(live_B, perf_counter() - started)
        rest_B = live_B & (counts_B == 0)
        if self.below is None or not rest_B.any():
            return found
        self.below.catch_up(prefix, rest_B & (prefix.lengths_B - self.below.cache.lengths_B > FAR))
        return found.then(self.below.propose(prefix, sampling, rest_B), rest_B)

    def record_verdict(self, guess: Draft, accepted_B: Ints, live_B: Bools) -> None:
        """Record how many tokens were accepted, for n-grams or for the draft below, whichever proposed them."""
        own_B = live_B & (guess.origins_BK[:, :1] == self.level).any(1) if self.below else live_B
        self.counters.record_verdict(guess.counts_B, accepted_B, own_B)
        if self.below:
            self.below.record_verdict(guess, accepted_B, live_B & ~own_B)

    def rewind(self, prefix: SequenceState) -> None:
        """Forget all from the last token on, which may be another one than was seen there."""
        for grams, length in zip(self.indexes, prefix.lengths_B.tolist(), strict=True):
            grams.forget(length - 1)
        if self.below:
            self.below.rewind(prefix)

    def prefill(self, prefix: SequenceState, b: int, length: int, *, grant: Grant = grant_all) -> Iterator[int]:
        """Read row b up to `length` tokens, 128K in a quarter of a second. A row left out is read when it is needed."""
        started = perf_counter()
        self.indexes[b].read(prefix.ids_BS[b, :length])
        self._tried[b] = max(1, length - TRIED), length
        self.counters.prefill_seconds_B[b] += perf_counter() - started
        yield length

    def swap_out(self, b: int) -> tuple[Any, ...]:
        """Return what a row holds, for `swap_in`. The draft below has its own call."""
        return self.indexes[b], self._tried[b], self.counters.swap_out(b)

    def swap_in(self, b: int, held: tuple[Any, ...]) -> None:
        """Let a fresh row go on as the one that was swapped out."""
        self.indexes[b], self._tried[b], counts = held
        self.counters.swap_in(b, counts)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        self.indexes = [self.indexes[b] for b in rows]
        self._tried = [self._tried[b] for b in rows]
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another proposer."""
        self.indexes += other.indexes
        self._tried += other._tried
        self.counters.join(other.counters)

    def hindsight(self, prefix: SequenceState, b: int, most: int) -> Iterator[tuple[int, int, bool]]:
        """Yield, for places of row b that were not tried yet, the length of the match and its hits, in tokens.

        And whether the place lies behind the prompt. It is tried once `most` tokens stand behind it. The text is read
        up to the last such place.
        """
        text_S = prefix.ids_BS[b, : prefix.lengths_B[b]]
        grams = self.indexes[b]
        begin, prompt = self._tried[b]
        places = range(begin, len(text_S) - most + 1, STRIDE)
        if places:
            grams.read(text_S[: places[-1]])
            self._tried[b] = places[-1] + STRIDE, prompt
        for place in places:
            match, after = grams.match(text_S[:place])
            run = 0
            if match:
                wrong = text_S[after : after + most] != text_S[place : place + most]  # what is beyond `place` is right
                run = int(wrong.argmax()) if wrong.any() else most
            yield match, run, place >= prompt

    def guess(self, prefix: SequenceState, b: int, least: float) -> Ints:
        text_S = prefix.ids_BS[b, : prefix.lengths_B[b]]
        if least == np.inf:
            return text_S[:0]
        self.indexes[b].read(text_S)
        length, after = self.indexes[b].match(text_S)
        return np.resize(text_S[after:], min(self.gamma, self.reach(length)) if length >= least else 0)

    def _needed_B(self) -> np.ndarray:
        """Tokens that a match must have: (B,)."""
        if self.below is None:
            return np.full(len(self.indexes), self.least)
        own_B, drafts_B = (
            (each.accepted_B + PRIOR) / (each.rejected_B + PRIOR) for each in (self.counters, self.below.counters)
        )
        return self.least * np.maximum(1, drafts_B / own_B)
