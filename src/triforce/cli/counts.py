"""Numbers of things in words. Imports nothing."""


def counted(count: int, thing: str, things: str = "") -> str:
    """Return a number and what it is of: `1 turn`, `2 turns`. things: several of them, if not `thing` and an s."""
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"
