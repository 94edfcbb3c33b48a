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

    def __init__(self, job: TokenSequence, tokenizer: Tokenizer | None) -> None:
        self.job = job
        self._stream = tokenizer.stream(after=job.prompt) if tokenizer else None
        self._text = StopStringBuffer(job.params.stop)

    def take(self, count: int, finish: Callable[[TokenSequence, int], None]) -> OutputChunk:
        """Read the last `count` tokens of the job. At the token that completes a stop string `finish` is to end it.

        Raises RequestError where the text is not what was asked for, because its grammar could not be followed.
        """
        if self.job.constraint and (failure := self.job.constraint.failure):
            raise RequestError(f"the grammar became too complex at token {len(self.job.tokens)}: {failure}")
        fresh, origins = self.job.tokens[-count:], self.job.origins[-count:]  # a stop string cuts the job's own
        shown, characters = "", list[int]()
        for token in fresh:
            text = self._stream.step(token) if self._stream else ""
            shown += self._text.add(text)
            characters.append(len(text))
            if self._text.stopped:
                finish(self.job, count - len(characters))
                break
        read = len(characters)
        if self.job.finish and self._stream:
            rest = self._stream.flush()
            characters[-1] += len(rest)
            shown += self._text.add(rest) + self._text.flush()
        logprobs = self.job.logprobs[-read:] if self.job.params.logprobs is not None else None
        job = self.job
        return OutputChunk(shown, fresh[:read], origins[:read], job.choice, job.finish, logprobs, characters, job.trace)

    def output(self) -> CompletionOutput:
        """The whole completion, once its job is done."""
        job = self.job
        return CompletionOutput(
            job.choice,
            self._text.text,
            job.tokens,
            job.finish or "length",
            job.logprobs if job.params.logprobs is not None else None,
            job.origins,
            job.seed,
            job.tiers,
            job.timeline,
        )
