"""Tally: the lines of a batch by what became of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_VALUE = re.compile(r"""'[^']*'|"[^"]*"|0x[0-9a-f]+|-?\d[\d.,]*""")
"""What differs between reasons of one kind: names, and numbers such as those of lines and bytes."""


@dataclass(slots=True)
class Tally:
    """Lines by what became of them."""

    answered: int = 0
    skipped: int = 0
    _refused: Counter[str] = field(default_factory=Counter)
    """Refusals by the kinds of their reasons, with counts."""
    _first: dict[str, str] = field(default_factory=dict)
    """The first reason of each kind."""

    @property
    def refused(self) -> int:
        return self._refused.total()

    def refuse(self, reason: str, name: str = "") -> None:
        """Count a line that is refused. name: of the line, where the reason does not say which it is."""
        kind = _VALUE.sub("", reason)
        self._refused[kind] += 1
        self._first.setdefault(kind, f"{name}: {reason}" if name else reason)

    def commonest(self) -> str:
        """Return how many lines are refused for the commonest kind of reason, and the first such reason."""
        (kind, times), *others = self._refused.most_common(2)
        if self.refused == 1:
            return f"The reason: {self._first[kind]}"
        which = "the commonest" if others else "one"
        return f"{times:,} line{'s' * (times > 1)} for {which} reason, the first: {self._first[kind]}"
