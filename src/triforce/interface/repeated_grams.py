"""Repetition of a text, by its 8-grams: what repeats is foretold by lookups, so a speedup over it says little.

A text that repeats its prompt is an edit, a quote or a table, and what it gains there is a gain that is wanted. One
that repeats itself is a loop.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 8
"""Tokens of what is looked for."""
MOST = 0.10
"""Share of 8-grams that may repeat."""


def repeated(ids: Sequence[int], prompt: Sequence[int] = ()) -> float:
    """Return the share of 8-grams that stood before in the same text, or in its prompt."""
    grams = _grams(ids)
    prompt_grams = set(_grams(prompt))
    return (len(grams) - len(set(grams) - prompt_grams)) / max(1, len(grams))


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[n : n + GRAM]) for n in range(len(ids) - GRAM + 1)]
