"""The interface between HTTP and generation: all above it is HTTP, nothing below it knows of HTTP.

An engine takes requests and hands out answers; how many it works on at a time, and in what order, is its own affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.engine import OutputChunk
from triforce.engine.inputs import Prompt, PromptSource
from triforce.interface.explain import BreakEvenPoint
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.structured_output.compiler import CompiledGrammar, GrammarCompiler


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Progress of a prompt's prefill, with the fields of llama.cpp's server. Sent where the request wants it."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Tokens that were read before, for another request."""
    processed: int
    """Tokens that are read, those of `cache` among them."""
    time_ms: int
    """Milliseconds since its turn came."""
    queue_place: int = 0
    """Its place among the prompts that wait, 1 for the next one; 0 once its turn has come."""

    def client_fields(self) -> dict[str, int]:
        """Return the fields that a client is sent: the place only where there is one."""
        return {name: value for name, value in asdict(self).items() if value or name != "queue_place"}


Event = OutputChunk | RequestOutput | PrefillProgress
"""Pieces of the `n` texts as they are ready, and at the end the whole: what `LLM.stream` yields. Progress is before."""


class ServedModel(Protocol):
    """The members of LLM that requests are parsed with."""

    @property
    def target(self) -> PromptSource: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def modes(self) -> list[str]: ...

    @property
    def sampling_defaults(self) -> dict[str, Any]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def grammars(self) -> GrammarCompiler: ...

    def encode(self, prompt: Prompt) -> list[int]: ...

    def break_even(self) -> BreakEvenPoint: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue. mode: one of `MODES`, None for the engine's own.

    scope: the owner, for KV sharing; None: KV is shared with nobody. progress: it is told how far its prompt is read.
    compiled: the grammar of `params`, which an engine need not compile then. It stays in its process. tried: that
    grammar has been compiled somewhere.
    """

    prompt: list[int]
    params: SamplingParams
    mode: str | None = None
    scope: str | None = ""
    progress: bool = False
    compiled: CompiledGrammar | None = None
    tried: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        tried = self.tried or self.compiled is not None
        return GenerationRequest, (self.prompt, self.params, self.mode, self.scope, self.progress, None, tried)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current load of an engine."""

    running: int
    waiting: int
    kv_tokens: int
    """Tokens whose K and V are held for the requests that run."""


class GenerationStream(Protocol):
    """Events of one request. Iterate once, in the event loop that submitted it."""

    @property
    def waited(self) -> float | None:
        """Seconds in the queue; None while it waits."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The events, then a RequestOutput. Raises TriforceError, ShuttingDown, ReplicaLost, or what the engine broke
        on."""

    def cancel(self) -> None:
        """Stop at the engine's next step, and give the KV back. Harmless when done."""


class EngineClient(Protocol):
    """Makes texts. All methods are called from one event loop and return at once, except `close`."""

    def submit(self, generations: list[GenerationRequest]) -> Sequence[GenerationStream]:
        """Queue requests, all or none. Raises QueueFull or ShuttingDown."""

    def load(self) -> EngineLoad:
        """Return the current load."""

    @property
    def alive(self) -> bool:
        """Whether it can still make texts."""

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None."""

    def drain(self) -> None:
        """Take no more requests; go on with those that were taken."""

    def stop(self) -> None:
        """Take no more requests, and end all others with ShuttingDown."""

    async def close(self) -> None:
        """Stop, and wait until nothing runs any more."""
