"""Scores of SentencePiece tokens as an order of merges, which is what the `tokenizers` library merges by.

llama.cpp merges two neighbours that make a token of the highest score, of equal scores the leftmost. The library merges
by the place in a list. Where scores differ the two are the same; where they are equal the list must be so ordered that
the left one of two merges that can meet comes first.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise

from triforce.checkpoint.gguf_vocabulary import NORMAL, GGUFVocabulary

Merge = tuple[str, str]
LONGEST = 512
"""Characters of the longest token that is looked at for how it may have been merged."""
MOST_TIED = 1024
"""Merges of one score that an order is looked for. Files that lost their scores have all of them in one."""


def merges_by_score(vocabulary: GGUFVocabulary) -> list[Merge]:
    """Each pair of tokens that make a token, in the order in which to merge. Raises ModelError if scores give none."""
    ids, scores = vocabulary.ids, vocabulary.numbers("scores")
    found: list[tuple[float, int, str, str]] = []
    for text, i in ids.items():
        if len(text) > LONGEST:
            vocabulary.fail(f"token {i} of tokenizer.ggml.tokens has {len(text)} characters, more than {LONGEST}")
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found += [(-scores[i], -len(left), left, right) for left, right in cuts if left in ids and right in ids]
    found.sort(key=lambda merge: merge[:2])
    groups = groupby(found, key=lambda merge: merge[0])
    return [pair for _, tied in groups for pair in _order(vocabulary, [(left, right) for *_, left, right in tied])]


def _order(vocabulary: GGUFVocabulary, tied: list[Merge]) -> list[Merge]:
    """Return merges of one score in their order; tokens that are found before a text is cut come last."""
    if len({left + right for left, right in tied}) < 2:
        return tied
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
