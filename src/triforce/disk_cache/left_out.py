"""LeftOut: what a folder that is read as text holds and is not read, and why, for whoever named the folder."""

from __future__ import annotations

from triforce.text_encoding import NotTextError

SHOWN = 3
"""Names of a reason that are listed; others are counted."""


class LeftOut:
    """Files and folders that are left out, by the reasons for that."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, why: str | OSError | NotTextError) -> None:
        """Add a file or a folder. What is gone meanwhile is not left out."""
        if isinstance(why, NotTextError):
            told = f"in another encoding; perhaps {why.conversion} converts it"
            why = told if why.conversion else "not UTF-8 text"
        elif isinstance(why, OSError):
            why = "" if isinstance(why, FileNotFoundError) else why.strerror or str(why)
        if why:
            self._names.setdefault(why, []).append(name)

    @property
    def told(self) -> str:
        """Return all in one line, each reason behind the names that it is of; nothing where nothing is left out."""
        return "; ".join(f"{_listed(sorted(names))} ({why})" for why, names in sorted(self._names.items()))


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")
