"""Ways to cut tokens into two tokens, found by hashes of their characters: vocabularies have millions.

The hash of a text is the sum of the numbers of its characters, each times a power of `BASE`, modulo 2^64. Sums up to
each character of all texts give the hash of any part.

Shape suffixes: T texts, C characters of all of them, M cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.ragged import Bools, Ints

Hashes = NDArray[np.uint64]
Scores = NDArray[np.float64]
BASE = 0x9E3779B97F4A7C15
"""An odd number, which has an inverse modulo 2^64."""
SLOT_BITS = 22
NONE = -1


class TokenCuts(NamedTuple):
    """Indices of the text of each cut, and of the two texts that it makes. Cuts of one text stand by where they are."""

    text_M: Ints
    left_M: Ints
    right_M: Ints


def token_cuts(texts: Sequence[str], score_T: Scores) -> TokenCuts:
    """All ways to cut one of the texts, none of which is empty, into two, except for those that merging never comes by.

    These are between two characters that make a text of a higher score than any other that one of them begins or ends
    there: merged by scores, the highest first, they meet before.
    """
    table = _TextTable(texts)
    text_M, at_M = np.repeat(np.arange(len(texts)), table.length_T), np.arange(len(table.code_C))
    inner_M = at_M > table.start_T[text_M]
    text_M, at_M = text_M[inner_M], at_M[inner_M]
    left_M = table.find(table.hashes(table.start_T[text_M], at_M))
    right_M = table.find(table.hashes(at_M, (table.start_T + table.length_T)[text_M]))
    longer_T = np.where(table.length_T > 1, score_T, -np.inf)
    first_T, last_T = longer_T.copy(), longer_T.copy()  # the highest score of what begins a text, and of what ends it
    np.maximum.at(first_T, text_M[left_M != NONE], longer_T[left_M[left_M != NONE]])
    np.maximum.at(last_T, text_M[right_M != NONE], longer_T[right_M[right_M != NONE]])
    both_M: Bools = (left_M != NONE) & (right_M != NONE)
    text_M, left_M, right_M, at_M = text_M[both_M], left_M[both_M], right_M[both_M], at_M[both_M]
    pair_M = table.find(table.hashes(at_M - 1, at_M + 1))
    merges_T = np.bincount(text_M, minlength=len(texts)) > 0
    others_M = (pair_M != NONE) & (pair_M != text_M) & merges_T[pair_M]
    kept_M = ~(others_M & (score_T[pair_M] > np.maximum(last_T[left_M], first_T[right_M])))
    return TokenCuts(text_M[kept_M], left_M[kept_M], right_M[kept_M])


class _TextTable:
    """Texts by the hashes of their characters."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.code_C = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32).astype(np.uint64) + np.uint64(1)
        self.length_T = np.fromiter(map(len, texts), np.int64, len(texts))
        self.start_T: Ints = np.cumsum(self.length_T) - self.length_T
        terms_C = self.code_C * _powers(BASE, len(self.code_C) + 1)[1:]
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms_C)])
        self._inverse = _powers(pow(BASE, -1, 1 << 64), len(self._sums))
        self._hash_T = self.hashes(self.start_T, self.start_T + self.length_T)
        self._slots = np.zeros(1 << SLOT_BITS, np.int64)
        self._slots[_slot(self._hash_T)] = np.arange(len(texts))
        crowded = np.flatnonzero(self._slots[_slot(self._hash_T)] != np.arange(len(texts)))
        self._crowded = np.concatenate([crowded[np.argsort(self._hash_T[crowded])], [0]])
        """Texts that another one has the slot of, by hash; behind them any text."""
        self._shared = np.zeros(1 << SLOT_BITS, np.bool_)
        self._shared[_slot(self._hash_T[crowded])] = True

    def hashes(self, begin_M: Ints, end_M: Ints) -> Hashes:
        """The hashes of parts of the texts, from one character up to another."""
        found_M: Hashes = (self._sums[end_M] - self._sums[begin_M]) * self._inverse[begin_M]
        return found_M

    def find(self, hash_M: Hashes) -> Ints:
        """The index of the text with each hash, or `NONE`."""
        slot_M = _slot(hash_M)
        found_M: Ints = self._slots[slot_M]
        missed_M = self._hash_T[found_M] != hash_M
        shared = np.flatnonzero(missed_M & self._shared[slot_M])
        found_M[missed_M] = NONE
        others = self._crowded[np.searchsorted(self._hash_T[self._crowded[:-1]], hash_M[shared])]
        found_M[shared] = np.where(self._hash_T[others] == hash_M[shared], others, NONE)
        return found_M


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    found: Hashes = np.cumprod(factors)
    return found


def _slot(hash_M: Hashes) -> Ints:
    found_M: Ints = (hash_M >> np.uint64(64 - SLOT_BITS)).astype(np.int64)
    return found_M
