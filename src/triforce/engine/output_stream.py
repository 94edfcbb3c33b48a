"""OutputStream: one completion as its text grows. Tokens of a sequence become text, which is cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.sequence import TokenSequence
from triforce.errors import RequestError
from triforce.interface.frozen_fields import fields_frozen
from triforce.interface.json_values import json_value
from triforce.interface.outputs import CompletionOutput, DecodingSnapshot, Logprob, TokenLogprobs


@fields_frozen
@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Text that is ready to show, and the tokens that came with it, with the names of the tiers that proposed them.

    A text is shown as it grows by `for piece in llm.stream(prompt): print(piece, end="", flush=True)`.
    """

    text: str
    token_ids: list[int]
    origins: list[str]
    index: int
    """Index among the `n` completions."""
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if they were asked for."""
    characters: list[int] = field(default_factory=list)
    """Characters that each token adds to the text, of which stop strings may hold some back."""
    trace: DecodingSnapshot | None = None
    """State of the decoding, if that was asked for."""

    def __str__(self) -> str:
        """Return the text, so that `"".join(map(str, stream))` is all of it."""
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON keeps them; None is the logarithm of a probability of zero."""
        return dict(json_value(self))


class OutputStream:
    """Follows one sequence of an engine. Without a tokenizer there are tokens but no text."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer | None) -> None:
        self.sequence, self._tokenizer, self._logprobs = sequence, tokenizer, list[TokenLogprobs]()
        self._stream = tokenizer.stream(after=sequence.prompt) if tokenizer else None
        self._text = StopStringBuffer(sequence.params.stop)

    def take(self, count: int, finish: Callable[[TokenSequence, int], None]) -> OutputChunk:
        """Read the last `count` tokens of the sequence, and return what is ready to show.

        finish: called with the sequence and the number of surplus tokens where a stop string is complete. Raises
        RequestError where the text is not what was asked for, because its grammar could not be followed.
        """
        sequence = self.sequence
        if sequence.constraint and (failure := sequence.constraint.failure):
            raise RequestError(f"the grammar became too complex at token {len(sequence.tokens)}: {failure}")
        fresh, origins = sequence.tokens[-count:], sequence.origins[-count:]  # a stop string cuts the sequence's own
        shown, characters = "", list[int]()
        for token in fresh:
            text = self._stream.step(token) if self._stream else ""
            shown += self._text.add(text)
            characters.append(len(text))
            if self._text.stopped:
                finish(sequence, count - len(characters))
                break
        read = len(characters)
        if sequence.finish and self._stream:
            rest = self._stream.flush()
            characters[-1] += len(rest)
            shown += self._text.add(rest) + self._text.flush()
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = [self.with_texts(entry) for entry in sequence.logprobs[-read:]]
            self._logprobs += logprobs
        return OutputChunk(
            shown, fresh[:read], origins[:read], sequence.choice, sequence.finish, logprobs, characters, sequence.trace
        )

    def with_texts(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Return log-probabilities with the texts of their tokens, where there is a tokenizer."""
        if (tokenizer := self._tokenizer) is None:
            return entry

        def read(token: Logprob) -> Logprob:
            return token._replace(text=tokenizer.text_of(token.token_id))

        return TokenLogprobs(read(entry.chosen), tuple(map(read, entry.top)))

    def output(self) -> CompletionOutput:
        """Return the whole completion of a finished sequence."""
        sequence = self.sequence
        return CompletionOutput(
            sequence.choice,
            self._text.text,
            sequence.tokens,
            sequence.finish or "length",
            self._logprobs if sequence.params.logprobs is not None else None,
            sequence.origins,
            sequence.seed,
            sequence.tiers,
            sequence.timeline,
            sequence.report,
        )


class StopStringBuffer:
    """Gives out text as soon as no stop string can begin in it. A stop string itself is never given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Append a piece of text. Returns what can be shown now: nothing after a stop."""
        if self.stopped:
            return ""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._show(min(found))
        return self._show(len(self._held) - partial_match(self._held, self._stops))

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        return "" if self.stopped else self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown


def partial_match(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of one of `stops`, and not all of it."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
