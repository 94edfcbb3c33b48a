"""The order in which entries are given up: least recently used first, and first those that were used once.

An entry's place in this order is a number that stands where a file has its time of change. Seconds count uses of the
folder. Nanoseconds say whether an entry was used again, and place it within its text: the end goes before the
beginning, without which nobody would find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SECOND = 10**9
AGAIN = SECOND // 2
PROTECTED = 0.8
"""Share of the size that entries which were used again may hold against new ones."""
ROOM = 1 / 16
"""Share of the size that is made free at a time."""


class Held(NamedTuple):
    """An entry that is there."""

    name: str
    bytes: int
    place: int


def place_of(order: int, index: int, again: bool) -> int:
    """Return the place of entry `index` of a text, at a use of the folder; again: the text was used before."""
    return order * SECOND + AGAIN * again + AGAIN - 1 - min(index, AGAIN - 1)


def order_of(place: int) -> int:
    """Return the use of the folder that a place is of."""
    return place // SECOND


def to_drop(entries: Sequence[Held], most: float) -> list[Held]:
    """Return entries to give up so that the others hold at most so many bytes.

    So many large texts that are read once do not empty the cache: those that were used again stay, up to their share.
    """
    left = sum(entry.bytes for entry in entries) - most
    shielded, protected = 0, set()
    for entry in sorted(entries, key=lambda entry: -entry.place):
        if entry.place % SECOND >= AGAIN and shielded + entry.bytes <= PROTECTED * most:
            shielded += entry.bytes
            protected.add(entry.name)
    dropped = []
    for entry in sorted(entries, key=lambda entry: (entry.name in protected, entry.place)):
        if left <= 0:
            break
        left -= entry.bytes
        dropped.append(entry)
    return dropped
