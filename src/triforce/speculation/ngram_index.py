"""Where the end of a text occurred before: its n-grams, each with the place where it was last, and where before that.

S tokens of a text.
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
        """See this text, which begins with what was seen."""
        start = len(self._grams)
        tokens = text_S[start:].astype(np.int32)
        raw, unit = tokens.tobytes(), tokens.itemsize
        for place, at in enumerate(range(0, len(raw) - (self.n - 1) * unit, unit), start):
            gram = raw[at : at + self.n * unit]
            self._before.append(self._latest.get(gram, -1))
            self._grams.append(gram)
            self._latest[gram] = place

    def forget(self, length: int) -> None:
        """See only the first `length` tokens: as if nothing had been read behind them."""
        for _ in range(len(self._grams) - max(0, length - self.n + 1)):
            gram, before = self._grams.pop(), self._before.pop()
            if before < 0:
                del self._latest[gram]
            else:
                self._latest[gram] = before

    def match(self, text_S: Ints) -> tuple[int, int]:
        """How many tokens at the end of a text were there before, and the place that followed them.

        What was read begins with that text. The longest match of at least n tokens, of the latest ones; the latest of
        equals. (0, 0) without any.
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
