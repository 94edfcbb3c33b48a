"""NgramProposer: finds an earlier occurrence of the longest repeated suffix, and proposes the tokens after it.

The idea is prompt lookup decoding (Saxena 2023), with longer proposals after longer matches as in SuffixDecoding
(Oliaro et al. 2024, arXiv 2411.04975). The distribution of a copied token is a point mass: all couplings stay exact.
Shape suffixes: B rows, S tokens of a text, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Self

import numpy as np

from triforce.ragged import Bools, Ints, ints
from triforce.speculation.draft import Counters, Draft, SequenceState
from triforce.speculation.protocols import Grant, TokenSampler, grant_all
from triforce.speculation.tier import Tier

MIN_MATCH_ALONE, MIN_MATCH_ABOVE_DRAFT = 3, 5
"""Tokens of the shortest match that pays, without and with a draft model below.

Measured with `python -m benchmarks.lookup`: after a match of 1, 2, 3, 4 or 5 tokens, the target gives the copied token
a probability of 0.11, 0.26, 0.44, 0.56 or 0.75. Where the match has 1, 4 or 5 tokens, the target would accept 0.62,
0.51 or 0.42 of the draft model's tokens. So above a draft model n-grams pay from a match of 5 tokens on. Without a
draft model a rejected token costs only one more column of a pass, so that shorter matches pay."""

PRIOR_COUNT = 4.0  # prior of the accepted tokens, and of the rejected proposals
STRIDE = 8  # tokens between two places that `hindsight` evaluates
PROMPT_TAIL = 64  # tokens before the end of the prompt, from where `hindsight` begins
MAX_MATCH = 64  # tokens of a match that are compared beyond the n-gram
_MATCH_OFFSETS = np.arange(1, MAX_MATCH + 1)
OCCURRENCES = 16  # latest occurrences that are compared: a frequent n-gram has thousands in a long text


class NgramIndex:
    """Index of the n-grams of one text, which may grow and shrink: a dictionary and two lists, some 150 bytes a token.

    Place i is the start of the n-gram of tokens [i, i + n). Reading or forgetting a token takes constant time.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._latest_places: dict[bytes, int] = {}
        self._grams: list[bytes] = []
        self._previous_places: list[int] = []  # of each place, the previous one of the same n-gram; -1: none

    def read(self, text_S: Ints) -> None:
        """Add the new tokens of a text, which begins with the text read so far."""
        start = len(self._grams)
        tokens = text_S[start:].astype(np.int32)
        raw = tokens.tobytes()
        token_bytes = tokens.itemsize
        for place, offset in enumerate(range(0, len(raw) - (self.n - 1) * token_bytes, token_bytes), start):
            gram = raw[offset : offset + self.n * token_bytes]
            self._previous_places.append(self._latest_places.get(gram, -1))
            self._grams.append(gram)
            self._latest_places[gram] = place

    def forget(self, length: int) -> None:
        """Forget all tokens after the first `length`, as if they had never been read."""
        for _ in range(len(self._grams) - max(0, length - self.n + 1)):
            gram = self._grams.pop()
            previous_place = self._previous_places.pop()
            if previous_place < 0:
                del self._latest_places[gram]
            else:
                self._latest_places[gram] = previous_place

    def match(self, text_S: Ints) -> tuple[int, int]:
        """Find the longest suffix of a text, of at least n tokens, that occurred earlier in the text.

        The text is a prefix of the text read so far. Only the latest `OCCURRENCES` places of the text's last n-gram are
        compared, and of equally long matches the latest one counts. Returns the length of the match and the place after
        the earlier occurrence; (0, 0) without a match.
        """
        places = list[int]()
        end = len(text_S) - self.n
        place = self._previous_places[end] if end >= 0 else -1
        while place >= 0 and len(places) < OCCURRENCES:
            places.append(place)
            place = self._previous_places[place]
        if not places:
            return 0, 0
        place_O1 = np.array(places)[:, None]  # all at once, as a call of numpy costs more than its computation
        end_L, place_OL = (text_S[np.maximum(start - _MATCH_OFFSETS, 0)] for start in (end, place_O1))
        differ_OL = (end_L != place_OL) | (place_O1 < _MATCH_OFFSETS)
        length_O = np.where(differ_OL.any(1), differ_OL.argmax(1), MAX_MATCH)
        best = int(length_O.argmax())
        return self.n + int(length_O[best]), places[best] + self.n


class NgramProposer:
    """Proposes tokens from the text where it repeats itself. Elsewhere the draft below proposes, if there is one.

    A proposal has half as many tokens as the match, because about that many are accepted; it has at most `gamma`. It
    may overlap its own source, as copies do in LZ77. The odds of a proposer are its accepted tokens per rejected
    proposal. If the draft's odds are better than those of n-grams, the shortest match that is used is `min_match` times
    the ratio of the odds. So n-grams propose less in a text where they do not pay, and more once it repeats itself.
    min_match: tokens of the shortest match; 0: the constant that fits `below`.
    """

    name = "ngram"

    def __init__(self, rows: int, gamma: int = 2, below: Tier[Any] | None = None, min_match: int = 0) -> None:
        self.gamma = gamma
        self.below = below
        self._min_match = min_match
        self.level: int = below.level + 1 if below else 0
        self.counters = Counters(rows)
        self.indexes = [NgramIndex(self.min_match) for _ in range(rows)]
        self._hindsight_places = [(0, 0)] * rows
        """By row: the next place that `hindsight` evaluates, and the length of the prompt."""

    @property
    def min_match(self) -> int:
        """Tokens of the shortest match that is used."""
        return self._min_match or (MIN_MATCH_ABOVE_DRAFT if self.below else MIN_MATCH_ALONE)

    @staticmethod
    def proposal_length(match: int) -> int:
        """Return the number of draft tokens that are proposed after a match of `match` tokens."""
        return max(1, match // 2)

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Propose tokens for the live rows, from n-grams or else by the draft below. A row may get none."""
        started = perf_counter()
        draft_rows = [
            self.draft_row(prefix, b, min_match)
            for b, min_match in enumerate(np.where(live_B, self._min_matches_B(), np.inf))
        ]
        counts_B = ints([len(row) for row in draft_rows])
        probs_size = sampling.probs_size
        ngram_draft = Draft.empty(len(draft_rows), probs_size)
        if counts_B.any():  # rare in most texts
            tokens_BK = np.zeros((len(draft_rows), counts_B.max()), dtype=np.int64)
            for cells_K, row in zip(tokens_BK, draft_rows, strict=True):
                cells_K[: len(row)] = row
            probs_BKV = np.zeros((*tokens_BK.shape, probs_size))
            if probs_size:
                np.put_along_axis(probs_BKV, tokens_BK[..., None], 1.0, axis=2)
            ngram_draft = Draft(tokens_BK, probs_BKV, np.full_like(tokens_BK, self.level), counts_B)
        self.counters.record_passes(live_B, perf_counter() - started)
        rest_B = live_B & (counts_B == 0)
        if self.below is None or not rest_B.any():
            return ngram_draft
        deque(self.below.catch_up(prefix, rest_B), maxlen=0)
        return ngram_draft.extend(self.below.propose(prefix, sampling, rest_B), rest_B)

    def record_verdict(self, draft: Draft, accepted_B: Ints, live_B: Bools) -> None:
        """Record the accepted tokens for the proposer of each row: n-grams or the draft below."""
        ngram_B = live_B & (draft.origins_BK[:, :1] == self.level).any(1) if self.below else live_B
        self.counters.record_verdict(draft.counts_B, accepted_B, ngram_B)
        if self.below:
            self.below.record_verdict(draft, accepted_B, live_B & ~ngram_B)

    def rewind(self, prefix: SequenceState) -> None:
        """Forget the last token of each text and all after it: the index may hold a rejected token at its place."""
        for index, length in zip(self.indexes, prefix.lengths_B.tolist(), strict=True):
            index.forget(length - 1)
        if self.below:
            self.below.rewind(prefix)

    def prefill(self, prefix: SequenceState, b: int, length: int, *, grant: Grant = grant_all) -> Iterator[int]:
        """Index the first `length` tokens of row b. A row without prefill is indexed when n-grams first propose."""
        started = perf_counter()
        self.indexes[b].read(prefix.ids_BS[b, :length])
        self._hindsight_places[b] = max(1, length - PROMPT_TAIL), length
        self.counters.prefill_seconds_B[b] += perf_counter() - started
        yield length

    def swap_out(self, b: int) -> tuple[Any, ...]:
        """Return the state of row b, for `swap_in`, without that of the draft below."""
        return self.indexes[b], self._hindsight_places[b], self.counters.swap_out(b)

    def swap_in(self, b: int, swapped_row: tuple[Any, ...]) -> None:
        """Continue in row b, which is new, with the state of a row that was swapped out."""
        self.indexes[b], self._hindsight_places[b], counts = swapped_row
        self.counters.swap_in(b, counts)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        self.indexes = [self.indexes[b] for b in rows]
        self._hindsight_places = [self._hindsight_places[b] for b in rows]
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another proposer."""
        self.indexes += other.indexes
        self._hindsight_places += other._hindsight_places
        self.counters.join(other.counters)

    def hindsight(self, prefix: SequenceState, b: int, compared_tokens: int) -> Iterator[tuple[int, int, bool]]:
        """Compare past tokens of row b with what n-grams would have proposed, so that the planner can rate n-grams.

        Yields (tokens of the match, hits, whether the place is after the prompt) for each new place. hits: number of
        tokens that a proposal at the place gets right before its first wrong one. A place is evaluated once
        `compared_tokens` tokens follow it. The text is indexed up to the last place.
        """
        text_S = prefix.ids_BS[b, : prefix.lengths_B[b]]
        index = self.indexes[b]
        begin, prompt_length = self._hindsight_places[b]
        places = range(begin, len(text_S) - compared_tokens + 1, STRIDE)
        if places:
            index.read(text_S[: places[-1]])
            self._hindsight_places[b] = places[-1] + STRIDE, prompt_length
        for place in places:
            match, match_end = index.match(text_S[:place])
            hits = 0
            if match:
                # A proposal that runs past `place` copies tokens of its own. Up to its first wrong token these equal
                # the text's, so the text stands in for them.
                wrong = text_S[match_end : match_end + compared_tokens] != text_S[place : place + compared_tokens]
                hits = int(wrong.argmax()) if wrong.any() else compared_tokens
            yield match, hits, place >= prompt_length

    def draft_row(self, prefix: SequenceState, b: int, min_match: float) -> Ints:
        """Return the draft tokens of row b; none without a match of `min_match` tokens."""
        text_S = prefix.ids_BS[b, : prefix.lengths_B[b]]
        if min_match == np.inf:
            return text_S[:0]
        self.indexes[b].read(text_S)
        length, match_end = self.indexes[b].match(text_S)
        if length < min_match:
            return text_S[:0]
        return np.resize(text_S[match_end:], min(self.gamma, self.proposal_length(length)))

    def _min_matches_B(self) -> np.ndarray:
        """Tokens of the shortest match that is used, by row: (B,)."""
        if self.below is None:
            return np.full(len(self.indexes), self.min_match)
        ngram_odds_B, draft_odds_B = (
            (counters.accepted_B + PRIOR_COUNT) / (counters.rejected_B + PRIOR_COUNT)
            for counters in (self.counters, self.below.counters)
        )
        return self.min_match * np.maximum(1, draft_odds_B / ngram_odds_B)
