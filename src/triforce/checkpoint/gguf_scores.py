"""Scores of SentencePiece tokens as an order of merges, which is what the `tokenizers` library merges by.

llama.cpp merges two neighbours that make a token of the highest score, of equal scores the leftmost. The library merges
by the place in a list. Where scores differ the two are the same; where they are equal the list must be so ordered that
the left one of two merges that can meet comes first.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np

from triforce.checkpoint.gguf_vocabulary import NORMAL, GGUFVocabulary
from triforce.checkpoint.kept_merges import Merges, kept_merges
from triforce.checkpoint.token_cuts import Scores, token_cuts
from triforce.ragged import Ints

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
    texts, score_T = list(vocabulary.ids), np.asarray(vocabulary.numbers("scores"), np.float64)
    length_T = np.fromiter(map(len, texts), np.int64, len(texts))
    if (length := int(length_T.max())) > LONGEST:
        token = int(length_T.argmax())
        vocabulary.fail(f"token {token} of tokenizer.ggml.tokens has {length} characters, more than {LONGEST}")
    if (length := int(length_T.sum())) > MOST_CHARACTERS:
        vocabulary.fail(f"tokenizer.ggml.tokens has {length} characters, more than {MOST_CHARACTERS}")
    find = partial(_merges, vocabulary, texts, score_T, length_T)
    merges_M2 = kept_merges(texts, score_T, vocabulary.kinds, find)
    text_T = np.array(texts, dtype=np.object_)
    return list(zip(*text_T[merges_M2.T].tolist(), strict=True))


def _merges(vocabulary: GGUFVocabulary, texts: list[str], score_T: Scores, length_T: Ints) -> Merges:
    """Return the ids of the two tokens of each merge in their order, (M, 2). Raises ModelError if scores give none."""
    cuts = token_cuts(texts, score_T)
    order = np.lexsort((-length_T[cuts.left_M], -score_T[cuts.text_M]))
    text_M, left_M, right_M = (side_M[order] for side_M in cuts)
    merges_M2 = np.stack([left_M, right_M], 1).astype(np.int32)
    tied, normal_T = _tied(text_M, score_T[text_M]), np.asarray(vocabulary.kinds) == NORMAL
    if sum(int(normal_T[text_M[begin:end]].sum()) ** 2 for begin, end in tied) > MOST_COMPARED:
        vocabulary.fail("tokenizer.ggml.scores has too many tokens whose score others have, too: their order is lost")
    for begin, end in tied:
        pairs = [(texts[left], texts[right]) for left, right in merges_M2[begin:end].tolist()]
        ordered = _order(vocabulary, pairs)
        merges_M2[begin:end] = [(vocabulary.ids[left], vocabulary.ids[right]) for left, right in ordered]
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
        order = list(TopologicalSorter(_befores(normal)).static_order())
    except CycleError:
        first = "".join(normal[0])[:40]
        vocabulary.fail(f"tokenizer.ggml.scores has one score for {first!r} and others: their order is lost")
    ordered = set(order)
    return order + [pair for pair in tied if pair not in ordered]


def _befores(tied: list[Merge]) -> dict[Merge, set[Merge]]:
    """Return which merges come before each: those to its left that it can meet, and those that it makes a part of."""
    by_left: dict[str, list[Merge]] = defaultdict(list)
    by_right: dict[str, list[Merge]] = defaultdict(list)
    for pair in tied:
        by_left[pair[0]].append(pair)
        by_right[pair[1]].append(pair)
    before: dict[Merge, set[Merge]] = {pair: set() for pair in tied}
    for left, right in tied:
        for other in by_left[right]:
            if other != (left, right) and not _repeats(left, right, other[1]):
                before[other].add((left, right))
        before[left, right].update(by_left[left + right], by_right[left + right])
    return before


def _repeats(*parts: str) -> bool:
    """Whether all are repetitions of one text. Merged from the left, such never meet but as its longest tokens."""
    return all(one + other == other + one for one, other in pairwise(parts))
