"""What somebody may have meant who has mistyped a name."""

from __future__ import annotations

from collections.abc import Iterable

ALIKE = 0.6
"""Of 1: how much a name must have of what was typed."""


def suggest(typed: str, names: Iterable[str]) -> str:
    """The nearest name in brackets, to stand behind what was typed; nothing where none is near."""
    from difflib import get_close_matches  # only mistakes need it

    nearest = get_close_matches(typed, list(names), 1, ALIKE)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
