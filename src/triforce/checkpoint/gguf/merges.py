"""Scores of SentencePiece tokens as an order of merges, which is what the `tokenizers` library merges by.

llama.cpp merges two neighbours that make a token of the highest score, of equal scores the leftmost. The library merges
by the place in a list. Where scores differ the two are the same; where they are equal the list must be so ordered that
the left one of two merges that can meet comes first.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.checkpoint.gguf.vocabulary import NORMAL, GGUFVocabulary
from triforce.ragged import Bools, Ints
from triforce.user_cache import user_cache
from triforce.whole_file import whole_file

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
    text_M = np.repeat(np.arange(len(texts)), table.length_T)
    cut_M = np.arange(len(table.code_C))
    inner_M = cut_M > table.start_T[text_M]
    text_M = text_M[inner_M]
    cut_M = cut_M[inner_M]
    left_M = table.find(table.hashes(table.start_T[text_M], cut_M))
    right_M = table.find(table.hashes(cut_M, (table.start_T + table.length_T)[text_M]))
    merged_score_T = np.where(table.length_T > 1, score_T, -np.inf)
    # the highest score of what begins a text, and of what ends it
    start_score_T = merged_score_T.copy()
    end_score_T = merged_score_T.copy()
    np.maximum.at(start_score_T, text_M[left_M != NONE], merged_score_T[left_M[left_M != NONE]])
    np.maximum.at(end_score_T, text_M[right_M != NONE], merged_score_T[right_M[right_M != NONE]])
    both_tokens_M: Bools = (left_M != NONE) & (right_M != NONE)
    text_M = text_M[both_tokens_M]
    left_M = left_M[both_tokens_M]
    right_M = right_M[both_tokens_M]
    cut_M = cut_M[both_tokens_M]
    pair_M = table.find(table.hashes(cut_M - 1, cut_M + 1))
    merges_T = np.bincount(text_M, minlength=len(texts)) > 0
    crossing_M = (pair_M != NONE) & (pair_M != text_M) & merges_T[pair_M]
    kept_M = ~(crossing_M & (score_T[pair_M] > np.maximum(end_score_T[left_M], start_score_T[right_M])))
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
        hash_M: Hashes = (self._sums[end_M] - self._sums[begin_M]) * self._inverse[begin_M]
        return hash_M

    def find(self, hash_M: Hashes) -> Ints:
        """The index of the text with each hash, or `NONE`."""
        slot_M = _slot(hash_M)
        index_M: Ints = self._slots[slot_M]
        missed_M = self._hash_T[index_M] != hash_M
        shared = np.flatnonzero(missed_M & self._shared[slot_M])
        index_M[missed_M] = NONE
        crowded_texts = self._crowded[np.searchsorted(self._hash_T[self._crowded[:-1]], hash_M[shared])]
        index_M[shared] = np.where(self._hash_T[crowded_texts] == hash_M[shared], crowded_texts, NONE)
        return index_M


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    powers: Hashes = np.cumprod(factors)
    return powers


def _slot(hash_M: Hashes) -> Ints:
    slot_M: Ints = (hash_M >> np.uint64(64 - SLOT_BITS)).astype(np.int64)
    return slot_M


Merges = NDArray[np.int32]
FEWEST_TOKENS = 1 << 16
"""Of a vocabulary whose merges are kept; those of others are found in a fifth of a second."""
_HASH_BYTES = 32


def cached_merges(
    texts: list[str], scores: NDArray[np.float64], kinds: list[int], find: Callable[[], Merges]
) -> Merges:
    """Return the ids of the left and right token of each merge, (M, 2): kept ones, or those that `find` returns."""
    cache = user_cache() if len(texts) >= FEWEST_TOKENS else None
    if cache is None:
        return find()
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    code = Path(__file__).read_bytes()  # another one may find other merges
    hashed_parts = ("".join(texts).encode(), lengths.tobytes(), scores.tobytes(), np.asarray(kinds).tobytes(), code)
    file = cache / "merges" / _digest(hashlib.sha256(part).digest() for part in hashed_parts).hex()
    merges_M2 = _read(file)
    if merges_M2 is None:
        merges_M2 = find()
        _write(file, merges_M2)
    return merges_M2


def _read(file: Path) -> Merges | None:
    """Return what is in a file of merges, of which the sha256 stands in front."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if len(content) <= _HASH_BYTES or _digest([content[_HASH_BYTES:]]) != content[:_HASH_BYTES]:
        return None
    return np.frombuffer(content, np.int32, offset=_HASH_BYTES).reshape(-1, 2)


def _write(file: Path, merges_M2: Merges) -> None:
    content = merges_M2.tobytes()
    with suppress(OSError):  # a full or read-only disk: the next start finds them again
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            partial.write_bytes(_digest([content]) + content)


def _digest(parts: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


Merge = tuple[str, str]
LONGEST = 512
"""Characters of the longest token that is looked at for how it may have been merged."""
MOST_CHARACTERS = 1 << 22
"""Characters of all tokens. The largest vocabularies have a third of it."""
MOST_COMPARED = 1 << 24
"""Pairs of merges of one score that are compared, of all scores."""
MOST_TIED = 1024
"""Merges of one score that an order is looked for. Files that lost their scores have all of them in one."""


def merges_by_score(vocabulary: GGUFVocabulary) -> list[Merge]:
    """Each pair of tokens that make a token, in the order in which to merge. Raises ModelError if scores give none.

    Pairs that no text comes by may be left out.
    """
    texts = list(vocabulary.ids)
    score_T = np.asarray(vocabulary.numbers("scores"), np.float64)
    length_T = np.fromiter(map(len, texts), np.int64, len(texts))
    if (length := int(length_T.max())) > LONGEST:
        token = int(length_T.argmax())
        vocabulary.fail(f"token {token} of tokenizer.ggml.tokens has {length} characters, more than {LONGEST}")
    if (length := int(length_T.sum())) > MOST_CHARACTERS:
        vocabulary.fail(f"tokenizer.ggml.tokens has {length} characters, more than {MOST_CHARACTERS}")
    find = partial(_merges, vocabulary, texts, score_T, length_T)
    merges_M2 = cached_merges(texts, score_T, vocabulary.kinds, find)
    text_T = np.array(texts, dtype=np.object_)
    return list(zip(*text_T[merges_M2.T].tolist(), strict=True))


def _merges(vocabulary: GGUFVocabulary, texts: list[str], score_T: Scores, length_T: Ints) -> Merges:
    """Return the ids of the two tokens of each merge in their order, (M, 2). Raises ModelError if scores give none."""
    cuts = token_cuts(texts, score_T)
    order = np.lexsort((-length_T[cuts.left_M], -score_T[cuts.text_M]))
    text_M, left_M, right_M = (side_M[order] for side_M in cuts)
    merges_M2 = np.stack([left_M, right_M], 1).astype(np.int32)
    tied = _tied(text_M, score_T[text_M])
    normal_T = np.asarray(vocabulary.kinds) == NORMAL
    if sum(int(normal_T[text_M[begin:end]].sum()) ** 2 for begin, end in tied) > MOST_COMPARED:
        vocabulary.fail("tokenizer.ggml.scores has too many tokens whose score others have, too: their order is lost")
    for begin, end in tied:
        pairs = [(texts[left_token], texts[right_token]) for left_token, right_token in merges_M2[begin:end].tolist()]
        ordered = _order(vocabulary, pairs)
        merges_M2[begin:end] = [
            (vocabulary.ids[left_token], vocabulary.ids[right_token]) for left_token, right_token in ordered
        ]
    return merges_M2


def _tied(text_M: Ints, score_M: Scores) -> list[tuple[int, int]]:
    """Return where merges of one score, which stand together, begin and end, if they make several texts."""
    first_M = np.concatenate([[True], score_M[1:] != score_M[:-1]])[: len(text_M)]
    begins = np.flatnonzero(first_M)
    ends = np.append(begins, len(text_M))[1:]
    several_M = text_M != np.repeat(text_M[begins], ends - begins)
    groups = np.unique(np.searchsorted(begins, np.flatnonzero(several_M), "right") - 1)
    return list(zip(begins[groups].tolist(), ends[groups].tolist(), strict=True))


def _order(vocabulary: GGUFVocabulary, tied: list[Merge]) -> list[Merge]:
    """Return merges of one score in their order; tokens that are found before a text is cut come last."""
    normal = [pair for pair in tied if vocabulary.kinds[vocabulary.ids["".join(pair)]] == NORMAL]
    try:
        if len(normal) > MOST_TIED:
            raise CycleError
        order = list(TopologicalSorter(_predecessors(normal)).static_order())
    except CycleError:
        merged_text = "".join(normal[0])[:40]
        vocabulary.fail(f"tokenizer.ggml.scores has one score for {merged_text!r} and others: their order is lost")
    ordered = set(order)
    return order + [pair for pair in tied if pair not in ordered]


def _predecessors(tied: list[Merge]) -> dict[Merge, set[Merge]]:
    """Return which merges come before each: those to its left that it can meet, and those that it makes a part of."""
    by_left: dict[str, list[Merge]] = defaultdict(list)
    by_right: dict[str, list[Merge]] = defaultdict(list)
    for pair in tied:
        by_left[pair[0]].append(pair)
        by_right[pair[1]].append(pair)
    predecessors: dict[Merge, set[Merge]] = {pair: set() for pair in tied}
    for left_text, right_text in tied:
        for next_pair in by_left[right_text]:
            if next_pair != (left_text, right_text) and not _repeats(left_text, right_text, next_pair[1]):
                predecessors[next_pair].add((left_text, right_text))
        predecessors[left_text, right_text].update(by_left[left_text + right_text], by_right[left_text + right_text])
    return predecessors


def _repeats(*parts: str) -> bool:
    """Whether all are repetitions of one text. Merged from the left, such never meet but as its longest tokens."""
    return all(left_part + right_part == right_part + left_part for left_part, right_part in pairwise(parts))
