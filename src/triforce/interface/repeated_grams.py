"""Repetition of a text, by its 8-grams. Lookups predict repetitions, so a speedup over them says little.

A text that repeats its prompt is an edit, a quote or a table, and its speedup is a real gain. A text that repeats
itself is a loop.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 8
"""Tokens of a gram."""
MOST = 0.10
"""Maximal share of repeated 8-grams."""


def repeated(ids: Sequence[int], prompt: Sequence[int] = ()) -> float:
    """Return the share of 8-grams that occur earlier in the same text, or in its prompt."""
    grams = _grams(ids)
    prompt_grams = set(_grams(prompt))
    return (len(grams) - len(set(grams) - prompt_grams)) / max(1, len(grams))


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[n : n + GRAM]) for n in range(len(ids) - GRAM + 1)]
