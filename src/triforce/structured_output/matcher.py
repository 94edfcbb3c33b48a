"""Follows one text through a grammar: the adapter between llguidance's matcher and `sampling.Constraint`.

Shape suffixes: T tokens of the text, K guesses, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from triforce.ragged import Bools, Ints, common_prefix
from triforce.structured_output.json_numbers import Numbers, Place


class Matcher:
    """A `Constraint`. The matcher has read `_read`; where the text is another one by now, it goes back so far."""

    def __init__(self, matcher: Any, ends: Collection[int], vocab_size: int, numbers: Numbers | None = None) -> None:
        """`matcher` is an LLMatcher at the beginning of a text, and nobody else's; `ends`: end-of-sequence tokens.

        `numbers`: keep them short, as the text is JSON.
        """
        self._matcher, self._vocab_size, self._numbers = matcher, vocab_size, numbers
        self._ends = frozenset(ends)
        self._read: list[int] = []
        self._places = [Place()]  # at the beginning, and after each token that was read
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    @property
    def failure(self) -> str:
        error: str = self._matcher.get_error()
        return error.partition("\n")[0]

    def allowed(self, text_T: Ints, guesses_K: Ints) -> Bools:
        guesses = guesses_K.tolist()
        allowed_JV = np.ones((len(guesses) + 1, self._vocab_size), dtype=np.bool_)
        if not self._follow(text_T.tolist()):
            return allowed_JV
        for column_V, guess in zip(allowed_JV, [*guesses, None], strict=True):
            column_V[:] = self._next()
            if guess is None or guess in self._ends or not column_V[guess] or not self._take([guess]):
                break
        return allowed_JV

    def _follow(self, text: list[int]) -> bool:
        """Read this text and no other; False if there is nothing to say of what follows it."""
        if not self._ends.isdisjoint(text):
            return False
        common = common_prefix(self._read, text)
        if not self._matcher.is_error():
            self._matcher.rollback(len(self._read) - common)
        del self._read[common:], self._places[common + 1 :]
        return self._take(text[common:])

    def _take(self, tokens: list[int]) -> bool:
        if self._matcher.is_error():
            return True  # the text is to end, which `_next` sees to
        taken = self._matcher.try_consume_tokens(tokens)
        self._read += tokens[:taken]
        if self._numbers:
            for token in tokens[:taken]:
                self._places.append(self._numbers.after(self._places[-1], token))
        return bool(taken == len(tokens))

    def _next(self) -> Bools:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():  # before, or just now: a limit of the parser
            ended_V = np.zeros(self._vocab_size, dtype=np.bool_)
            ended_V[list(self._ends)] = True
            return ended_V
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        allowed_V: Bools = bits.view(np.bool_)
        return self._numbers.shortened(allowed_V, self._places[-1]) if self._numbers else allowed_V
