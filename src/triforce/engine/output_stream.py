"""One completion as its text grows: the tokens of an engine job, read as text and cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.sequence import TokenSequence
from triforce.engine.stop_strings import StopStringBuffer
from triforce.errors import RequestError
from triforce.interface.outputs import CompletionOutput, DecodingSnapshot, TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Text that is ready to show, and the tokens (with the tiers that proposed them) that arrived with it."""

    text: str
    token_ids: list[int]
    origins: list[str]
    index: int
    """Which of the `n` completions."""
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if they were asked for."""
    characters: list[int] = field(default_factory=list)
    """How many each token adds to the text, of which stop strings may hold some back."""
    trace: DecodingSnapshot | None = None
    """Where the decoding stands, if that was asked for."""


class OutputStream:
    """Follows one job of an engine. Without a tokenizer there are tokens but no text."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self._stream = tokenizer.stream(after=sequence.prompt) if tokenizer else None
        self._text = StopStringBuffer(sequence.params.stop)

    def take(self, count: int, finish: Callable[[TokenSequence, int], None]) -> OutputChunk:
        """Read the last `count` tokens of the job. At the token that completes a stop string `finish` is to end it.

        Raises RequestError where the text is not what was asked for, because its grammar could not be followed.
        """
        if self.sequence.constraint and (failure := self.sequence.constraint.failure):
            raise RequestError(f"the grammar became too complex at token {len(self.sequence.tokens)}: {failure}")
        fresh, origins = (
            self.sequence.tokens[-count:],
            self.sequence.origins[-count:],
        )  # a stop string cuts the job's own
        shown, characters = "", list[int]()
        for token in fresh:
            text = self._stream.step(token) if self._stream else ""
            shown += self._text.add(text)
            characters.append(len(text))
            if self._text.stopped:
                finish(self.sequence, count - len(characters))
                break
        read = len(characters)
        if self.sequence.finish and self._stream:
            rest = self._stream.flush()
            characters[-1] += len(rest)
            shown += self._text.add(rest) + self._text.flush()
        logprobs = self.sequence.logprobs[-read:] if self.sequence.params.logprobs is not None else None
        sequence = self.sequence
        return OutputChunk(
            shown, fresh[:read], origins[:read], sequence.choice, sequence.finish, logprobs, characters, sequence.trace
        )

    def output(self) -> CompletionOutput:
        """The whole completion, once its job is done."""
        sequence = self.sequence
        return CompletionOutput(
            sequence.choice,
            self._text.text,
            sequence.tokens,
            sequence.finish or "length",
            sequence.logprobs if sequence.params.logprobs is not None else None,
            sequence.origins,
            sequence.seed,
            sequence.tiers,
            sequence.timeline,
        )
