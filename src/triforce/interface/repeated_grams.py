"""Repetition of a text, by its 8-grams. An n-gram lookup predicts repetitions, so a repetitive text is always fast.

A text that repeats its prompt is an edit, a quote or a table, and its speedup is a real gain. A text that repeats
itself is a loop, and its speedup says little.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 8
"""Tokens of a gram."""
LOOP_SHARE = 0.10
"""Share of repeated 8-grams from which on a text counts as a loop."""


def repeated_share(ids: Sequence[int], prompt: Sequence[int] = ()) -> float:
    """Return the share of 8-grams that occur earlier in the same text, or in its prompt."""
    grams = _grams(ids)
    prompt_grams = set(_grams(prompt))
    return (len(grams) - len(set(grams) - prompt_grams)) / max(1, len(grams))


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[n : n + GRAM]) for n in range(len(ids) - GRAM + 1)]
