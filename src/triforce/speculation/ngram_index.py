"""NgramIndex: where the end of a text occurred before.

Shape suffix: S tokens of a text.
"""

from __future__ import annotations

import numpy as np

from triforce.ragged import Ints

LONGEST = 64  # tokens of a match that are looked at beyond the n-gram
TRIED = 16  # occurrences, the latest first: a frequent n-gram has thousands in a long text


class NgramIndex:
    """The n-grams of one text that grows, and may be cut back: a dictionary and two lists, some 150 bytes a token.

    Place i is where the n-gram of tokens [i, i + n) starts. A token takes constant time, to read and to forget.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._latest: dict[bytes, int] = {}
        self._grams: list[bytes] = []
        self._before: list[int] = []  # the place before each where its n-gram occurred; -1: there is none

    def read(self, text_S: Ints) -> None:
        """Read this text, which begins with what was read before."""
        start = len(self._grams)
        tokens = text_S[start:].astype(np.int32)
        raw, unit = tokens.tobytes(), tokens.itemsize
        for place, at in enumerate(range(0, len(raw) - (self.n - 1) * unit, unit), start):
            gram = raw[at : at + self.n * unit]
            self._before.append(self._latest.get(gram, -1))
            self._grams.append(gram)
            self._latest[gram] = place

    def forget(self, length: int) -> None:
        """Forget all but the first `length` tokens, as if no others had been read."""
        for _ in range(len(self._grams) - max(0, length - self.n + 1)):
            gram, before = self._grams.pop(), self._before.pop()
            if before < 0:
                del self._latest[gram]
            else:
                self._latest[gram] = before

    def match(self, text_S: Ints) -> tuple[int, int]:
        """Find the longest end of a text that occurred before, of at least n tokens; the latest of equals.

        The text is one that what was read begins with; of many occurrences the latest are tried. Returns the length of
        the match and the place behind it; (0, 0) without one.
        """
        longest, after, end = 0, 0, len(text_S) - self.n
        place = self._before[end] if end >= 0 else -1
        for _ in range(TRIED):
            if place < 0 or longest == LONGEST + self.n:
                break
            back = min(place, LONGEST)
            differ = (text_S[place - back : place] != text_S[end - back : end])[::-1]
            length = self.n + (int(differ.argmax()) if differ.any() else back)
            if length > longest:
                longest, after = length, place + self.n
            place = self._before[place]
        return longest, after
