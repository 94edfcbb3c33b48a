"""Counts as text. Imports nothing."""


def counted(count: int, thing: str, things: str = "") -> str:
    """Return a count with its noun: `1 turn`, `2 turns`. things: the plural, if it is not `thing` and an s."""
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"
