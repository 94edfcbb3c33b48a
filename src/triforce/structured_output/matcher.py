"""Matcher: a `sampling.Constraint` that follows one text through a grammar, by llguidance's matcher.

The length of JSON numbers is limited: a schema bounds their value only, and some models append digits forever.
Shape suffixes: T tokens of the text, K draft tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from triforce.ragged import Bools, Ints, common_prefix

MAX_NUMBER_CHARACTERS = 40
"""Characters of a number: enough for every float64 and 128-bit integer. A longer one ends once its schema allows it."""
_PARTS = frozenset(b"0123456789.eE+-")


class JsonState(NamedTuple):
    """State of a JSON text: within a string or not, and the length of the number at its end."""

    quoted: bool = False
    escaped: bool = False
    length: int = 0
    """Characters of the number so far; 0 outside of numbers."""

    def after(self, token_bytes: bytes) -> JsonState:
        """Return the state after the further bytes `token_bytes`."""
        quoted, escaped, length = self
        for byte in token_bytes:
            if quoted:
                quoted = escaped or byte != ord('"')
                escaped = not escaped and byte == ord("\\")
            else:
                quoted = byte == ord('"')
                length = length + 1 if byte in _PARTS else 0
        return JsonState(quoted, escaped, length)


class NumberLimits:
    """Ends JSON numbers after `MAX_NUMBER_CHARACTERS`. tokens: the bytes of each token of a vocabulary."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._leaving_V = np.array([not token or token[0] not in _PARTS for token in tokens])

    def end_long_numbers(self, allowed_V: Bools, state: JsonState) -> Bools:
        """Return the allowed tokens, without tokens that extend a number of full length, unless none would remain."""
        leaving_V = allowed_V & self._leaving_V
        return leaving_V if state.length >= MAX_NUMBER_CHARACTERS and leaving_V.any() else allowed_V


class Matcher:
    """Constraint of one text.

    llguidance's matcher has consumed the tokens `_consumed`. It rolls back where the text differs from them.

    matcher: an LLMatcher at the beginning of a text, for this object only. eos_ids: end-of-sequence tokens. numbers:
    limits of numbers, if the text is JSON.
    """

    def __init__(
        self, matcher: Any, eos_ids: Collection[int], vocab_size: int, numbers: NumberLimits | None = None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._numbers = numbers
        self._eos_ids = frozenset(eos_ids)
        self._consumed: list[int] = []
        self._states = [JsonState()]  # at the beginning, and after each consumed token
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    @property
    def failure(self) -> str:
        """Reason why the matcher cannot follow the text any more; empty if it can."""
        error: str = self._matcher.get_error()
        return error.partition("\n")[0]

    def allowed(self, text_T: Ints, draft_K: Ints) -> Bools:
        """Return a mask of the tokens that may follow the text and each of the draft tokens, bool (J, V)."""
        draft = draft_K.tolist()
        allowed_JV = np.ones((len(draft) + 1, self._vocab_size), dtype=np.bool_)
        if not self._follow(text_T.tolist()):
            return allowed_JV
        for column_V, token in zip(allowed_JV, [*draft, None], strict=True):
            column_V[:] = self._next_mask()
            if token is None or token in self._eos_ids or not column_V[token] or not self._consume([token]):
                break
        return allowed_JV

    def _follow(self, text: list[int]) -> bool:
        """Bring the matcher to this text. Returns False if the text has ended, so that any token may follow."""
        if not self._eos_ids.isdisjoint(text):
            return False
        common = common_prefix(self._consumed, text)
        if not self._matcher.is_error():
            self._matcher.rollback(len(self._consumed) - common)
        del self._consumed[common:], self._states[common + 1 :]
        return self._consume(text[common:])

    def _consume(self, tokens: list[int]) -> bool:
        if self._matcher.is_error():
            return True  # `_next_mask` allows only the end of the text
        consumed = self._matcher.try_consume_tokens(tokens)
        self._consumed += tokens[:consumed]
        if self._numbers:
            for token in tokens[:consumed]:
                self._states.append(self._states[-1].after(self._numbers.tokens[token]))
        return bool(consumed == len(tokens))

    def _next_mask(self) -> Bools:
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():  # an earlier error, or a limit of the parser just now
            ended_V = np.zeros(self._vocab_size, dtype=np.bool_)
            ended_V[list(self._eos_ids)] = True
            return ended_V
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        allowed_V: Bools = bits.view(np.bool_)
        return self._numbers.end_long_numbers(allowed_V, self._states[-1]) if self._numbers else allowed_V
