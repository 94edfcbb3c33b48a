"""Loops over an engine of the llama.cpp family: a token a pass, draft tokens, or passes of one width to be timed.

An engine gives its library's functions for a pass, for the KV and for a draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from benchmarks.compare.workers.clock import SLACK, Clock, Result, Turn, common_tokens

BATCH = 2048
"""Tokens that are handed over at a time, as by llama.cpp's own programs; it cuts them into `ubatch`."""

Draw = Callable[[int], int]
"""Draws a token from the logits of a scored token, by its place in the last pass."""

Proposer = Callable[[Any], list[int]]
"""Proposes draft tokens behind a text, an array of 32-bit integers."""


class TokenLoop(ABC):
    """A model with its context, and the prompt that was read last.

    api: functions of the library, by the names of llama.cpp.
    """

    def __init__(self, api: Any, context: Any, version: str, built: str) -> None:
        self.api = api
        self.context = context
        self.version = version
        self.built = built
        self._read: Sequence[int] = []

    @abstractmethod
    def forget(self, length: int) -> None:
        """Remove the KV of all tokens but the first `length`."""

    @abstractmethod
    def drawing(self, turn: Turn) -> AbstractContextManager[Draw]:
        """Return what draws the tokens of a turn."""

    @abstractmethod
    def proposing(self, turn: Turn) -> Proposer:
        """Return what proposes the draft tokens of a turn whose settings ask for some."""

    def generate(self, turn: Turn) -> Result:
        """Make the text of a turn."""
        clock = Clock()
        new_ids = list[int]()
        for tokens in self.texts(turn):
            new_ids += tokens
            clock.tick(len(new_ids))
            if len(new_ids) >= turn["tokens"]:
                break
        return clock.result(new_ids, self.version) | {"built": self.built}

    def texts(self, turn: Turn) -> Iterator[list[int]]:
        """Yield the new tokens of each pass, in the way that the turn's settings ask for."""
        settings = turn["settings"]
        if width := settings.get("width"):
            return self._in_passes(turn, width)
        return self._by_draft(turn) if settings.keys() & {"lookup", "draft"} else self._plainly(turn)

    def prefill(self, turn: Turn, ids: list[int]) -> None:
        """Read a prompt. What the last read prompt covers is in the KV already, unless the turn is fresh."""
        cached_tokens = common_tokens(self._read, turn)
        self.forget(cached_tokens)
        for start in range(cached_tokens, len(ids), BATCH):
            self.decode(ids[start : start + BATCH], start, scored=1)
        self._read = ids

    def decode(self, tokens: Sequence[int], position: int, scored: int) -> None:
        """Run a pass over tokens from a position on, the last `scored` of them with logits."""
        batch = self._batch
        count = len(tokens)
        batch.n_tokens = count
        for n, token in enumerate(tokens):
            batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, position + n, 1
            batch.seq_id[n][0] = 0
            batch.logits[n] = n >= count - scored
        if code := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    @cached_property
    def _batch(self) -> Any:
        return self.api.llama_batch_init(BATCH, 0, 1)

    def _plainly(self, turn: Turn) -> Iterator[list[int]]:
        length = len(turn["ids"])
        self.prefill(turn, turn["ids"])
        with self.drawing(turn) as draw:
            while True:
                token = draw(-1)
                yield [token]
                self.decode([token], length, scored=1)
                length += 1

    def _by_draft(self, turn: Turn) -> Iterator[list[int]]:
        """Run a pass over the last token and the draft. A draft token stays if the draw equals it."""
        import numpy as np

        length = len(turn["ids"])
        text = np.zeros(length + turn["tokens"] + SLACK, dtype=np.intc)
        text[:length] = turn["ids"]
        self.prefill(turn, turn["ids"])
        propose = self.proposing(turn)
        with self.drawing(turn) as draw:
            drawn = [draw(-1)]
            while True:
                yield drawn
                text[length : length + len(drawn)] = drawn
                length += len(drawn)
                self.forget(length - 1)
                draft_tokens = propose(text[:length])
                self.decode([drawn[-1], *draft_tokens], length - 1, scored=1 + len(draft_tokens))
                drawn = []
                for n, draft_token in enumerate([*draft_tokens, None]):
                    drawn.append(draw(n))
                    if drawn[-1] != draft_token:
                        break

    def _in_passes(self, turn: Turn, width: int) -> Iterator[list[int]]:
        """Run the same pass of `width` tokens behind the prompt again and again, as a verification does."""
        ids = turn["ids"]
        self.prefill(turn, ids)
        tokens = (ids * width)[:width]
        while True:
            yield [tokens[0]]
            self.forget(len(ids))
            self.decode(tokens, len(ids), scored=width)
