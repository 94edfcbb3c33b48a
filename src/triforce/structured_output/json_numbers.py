"""Numbers in JSON come to an end. A schema bounds their value at most, and some models write digits for ever.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from triforce.ragged import Bools

MOST_CHARACTERS = 40
"""Enough for every float64 and every integer of 128 bits. A longer number ends as soon as its schema lets it."""
_PARTS = frozenset(b"0123456789.eE+-")


class Place(NamedTuple):
    """Where a text of JSON stands."""

    quoted: bool = False
    escaped: bool = False
    length: int = 0
    """Characters of a number so far."""

    def after(self, written: bytes) -> Place:
        """The same, some bytes later."""
        quoted, escaped, length = self
        for byte in written:
            if quoted:
                quoted, escaped = escaped or byte != ord('"'), not escaped and byte == ord("\\")
            else:
                quoted, length = byte == ord('"'), length + 1 if byte in _PARTS else 0
        return Place(quoted, escaped, length)


class Numbers:
    """What the tokens of a vocabulary do to numbers."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """`tokens` are the bytes of each."""
        self._tokens = tokens
        self._leaving_V = np.array([not token or token[0] not in _PARTS for token in tokens])

    def after(self, place: Place, token: int) -> Place:
        return place.after(self._tokens[token])

    def shortened(self, allowed_V: Bools, place: Place) -> Bools:
        """What is allowed, less what goes on with a number that is long enough, unless that is all there is."""
        leaving_V = allowed_V & self._leaving_V
        return leaving_V if place.length >= MOST_CHARACTERS and leaving_V.any() else allowed_V
