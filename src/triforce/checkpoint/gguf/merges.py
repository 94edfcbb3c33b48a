"""Scores of SentencePiece tokens as the ordered list of merges that the `tokenizers` library needs.

llama.cpp merges the two neighbours that make the token with the highest score, and of equal scores the leftmost. The
library merges by place in a list. So a list in descending order of scores gives the same merges, apart from equal
scores. Of two merges with equal scores that can meet in a text, the left one must come first in the list.
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
"""Base of the rolling hash: odd, so that it has an inverse modulo 2^64."""
SLOT_BITS = 22
NONE = -1


class TokenCuts(NamedTuple):
    """Text indices of each cut: the cut text, its left part, its right part. A text's cuts are in order of place."""

    text_M: Ints
    left_M: Ints
    right_M: Ints


def token_cuts(texts: Sequence[str], score_T: Scores) -> TokenCuts:
    """Return all cuts of one text of `texts` into two others, int64 (M,) each, without cuts that merging never reaches.

    texts: none is empty. A cut is never reached if the two characters around it make a text whose score is higher than
    the score of any text at the end of the left part or the start of the right part: they merge first.
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
    # the highest score of any text at the start of a text, and at its end
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
    reached_M = ~(crossing_M & (score_T[pair_M] > np.maximum(end_score_T[left_M], start_score_T[right_M])))
    return TokenCuts(text_M[reached_M], left_M[reached_M], right_M[reached_M])


class _TextTable:
    """Hash table of texts by their characters."""

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
        """Texts whose slot another text has, sorted by hash, then any text as a sentinel."""
        self._shared = np.zeros(1 << SLOT_BITS, np.bool_)
        self._shared[_slot(self._hash_T[crowded])] = True

    def hashes(self, begin_M: Ints, end_M: Ints) -> Hashes:
        """Return the hashes, uint64 (M,), of the character ranges from `begin_M` to `end_M`."""
        hash_M: Hashes = (self._sums[end_M] - self._sums[begin_M]) * self._inverse[begin_M]
        return hash_M

    def find(self, hash_M: Hashes) -> Ints:
        """Return the index, int64 (M,), of the text with each hash, or `NONE`."""
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
"""Smallest vocabulary whose merges are cached. Merges of smaller ones are found in a fraction of a second."""
_HASH_BYTES = 32


def cached_merges(
    texts: list[str], scores: NDArray[np.float64], kinds: list[int], find: Callable[[], Merges]
) -> Merges:
    """Return the ids of the left and right token of each merge, int32 (M, 2), from the cache or from `find`."""
    cache = user_cache() if len(texts) >= FEWEST_TOKENS else None
    if cache is None:
        return find()
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    code = Path(__file__).read_bytes()  # other code may find other merges
    hashed_parts = ("".join(texts).encode(), lengths.tobytes(), scores.tobytes(), np.asarray(kinds).tobytes(), code)
    file = cache / "merges" / _digest(hashlib.sha256(part).digest() for part in hashed_parts).hex()
    merges_M2 = _read(file)
    if merges_M2 is None:
        merges_M2 = find()
        _write(file, merges_M2)
    return merges_M2


def _read(file: Path) -> Merges | None:
    """Return the merges in a file, (M, 2), whose sha256 precedes them; None if it is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if len(content) <= _HASH_BYTES or _digest([content[_HASH_BYTES:]]) != content[:_HASH_BYTES]:
        return None
    return np.frombuffer(content, np.int32, offset=_HASH_BYTES).reshape(-1, 2)


def _write(file: Path, merges_M2: Merges) -> None:
    content = merges_M2.tobytes()
    with suppress(OSError):  # a full or read-only disk: the next start computes them again
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            partial.write_bytes(_digest([content]) + content)


def _digest(parts: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


Merge = tuple[str, str]
LONGEST_TOKEN = 512
"""Characters of the longest accepted token."""
MOST_CHARACTERS = 1 << 22
"""Largest total of all tokens' characters. The largest vocabularies have a third of it."""
MOST_COMPARED = 1 << 24
"""Largest number of comparisons between merges of equal score, over all scores."""
MOST_TIED = 1024
"""Largest number of merges with one score. Files without usable scores have all merges under one."""


def merges_by_score(vocabulary: GGUFVocabulary) -> list[Merge]:
    """Return each pair of tokens that makes a token, in merge order. Raises ModelError if scores give no order.

    Pairs that occur in no text may be left out.
    """
    texts = list(vocabulary.ids)
    score_T = np.asarray(vocabulary.numbers("scores"), np.float64)
    length_T = np.fromiter(map(len, texts), np.int64, len(texts))
    if (length := int(length_T.max())) > LONGEST_TOKEN:
        token = int(length_T.argmax())
        vocabulary.fail(f"token {token} of tokenizer.ggml.tokens has {length} characters, more than {LONGEST_TOKEN}")
    if (length := int(length_T.sum())) > MOST_CHARACTERS:
        vocabulary.fail(f"tokenizer.ggml.tokens has {length} characters, more than {MOST_CHARACTERS}")
    find = partial(_merges, vocabulary, texts, score_T, length_T)
    merges_M2 = cached_merges(texts, score_T, vocabulary.kinds, find)
    text_T = np.array(texts, dtype=np.object_)
    return list(zip(*text_T[merges_M2.T].tolist(), strict=True))


def _merges(vocabulary: GGUFVocabulary, texts: list[str], score_T: Scores, length_T: Ints) -> Merges:
    """Return the ids of each merge's two tokens in merge order, (M, 2). Raises ModelError if scores give no order."""
    cuts = token_cuts(texts, score_T)
    order = np.lexsort((-length_T[cuts.left_M], -score_T[cuts.text_M]))
    text_M, left_M, right_M = (side_M[order] for side_M in cuts)
    merges_M2 = np.stack([left_M, right_M], 1).astype(np.int32)
    tied = _tied(text_M, score_T[text_M])
    normal_T = np.asarray(vocabulary.kinds) == NORMAL
    if sum(int(normal_T[text_M[begin:end]].sum()) ** 2 for begin, end in tied) > MOST_COMPARED:
        vocabulary.fail("tokenizer.ggml.scores has too many tokens with equal scores: their merges have no order")
    for begin, end in tied:
        pairs = [(texts[left_token], texts[right_token]) for left_token, right_token in merges_M2[begin:end].tolist()]
        ordered_pairs = _order(vocabulary, pairs)
        merges_M2[begin:end] = [
            (vocabulary.ids[left_token], vocabulary.ids[right_token]) for left_token, right_token in ordered_pairs
        ]
    return merges_M2


def _tied(text_M: Ints, score_M: Scores) -> list[tuple[int, int]]:
    """Return begin and end of each run of merges with one score that make several texts."""
    first_M = np.concatenate([[True], score_M[1:] != score_M[:-1]])[: len(text_M)]
    begins = np.flatnonzero(first_M)
    ends = np.append(begins, len(text_M))[1:]
    several_M = text_M != np.repeat(text_M[begins], ends - begins)
    groups = np.unique(np.searchsorted(begins, np.flatnonzero(several_M), "right") - 1)
    return list(zip(begins[groups].tolist(), ends[groups].tolist(), strict=True))


def _order(vocabulary: GGUFVocabulary, tied: list[Merge]) -> list[Merge]:
    """Return merges of one score in merge order. Merges to tokens that are not normal come last."""
    normal_pairs = [pair for pair in tied if vocabulary.kinds[vocabulary.ids["".join(pair)]] == NORMAL]
    try:
        if len(normal_pairs) > MOST_TIED:
            raise CycleError
        order = list(TopologicalSorter(_predecessors(normal_pairs)).static_order())
    except CycleError:
        merged_text = "".join(normal_pairs[0])[:40]
        vocabulary.fail(f"tokenizer.ggml.scores has one score for {merged_text!r} and others: merges have no order")
    ordered_pairs = set(order)
    return order + [pair for pair in tied if pair not in ordered_pairs]


def _predecessors(tied: list[Merge]) -> dict[Merge, set[Merge]]:
    """Return the merges that must precede each merge of one score.

    These are merges to its left that can meet it in a text, and merges that need its token as a part.
    """
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
    """Return whether all parts are repetitions of one text.

    Merges from the left then make the longest tokens first, so the order of such merges does not matter.
    """
    return all(left_part + right_part == right_part + left_part for left_part, right_part in pairwise(parts))
