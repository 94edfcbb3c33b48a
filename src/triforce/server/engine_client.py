"""The interface between HTTP and generation. Modules above it implement HTTP; modules below do not know of HTTP.

An engine accepts requests and streams answers. It decides on its own how many requests it runs, and in what order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    """Progress of a prompt's prefill, with the fields of llama.cpp's server. Sent to requests that ask for it."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Prompt tokens whose KV was cached by an earlier request."""
    processed: int
    """Prompt tokens read so far, including `cache`."""
    time_ms: int
    """Milliseconds since the prefill began."""
    queue_place: int = 0
    """Position in the queue, 1 for the next prompt; 0 once the prefill has begun."""

    def client_fields(self) -> dict[str, int]:
        """Return the JSON fields for a client. `queue_place` is left out when it is 0."""
        return {name: value for name, value in asdict(self).items() if value or name != "queue_place"}


Event = OutputChunk | RequestOutput | PrefillProgress
"""An event of a request. Progress comes first, then chunks of the `n` texts, then the whole output."""


class ServedModel(Protocol):
    """The members of LLM that the parsing of requests needs."""

    @property
    def target(self) -> PromptSource: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def modes(self) -> list[str]: ...

    @property
    def mode(self) -> str: ...

    @property
    def coupling(self) -> str: ...

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
    """A prompt to continue.

    mode: one of `MODES`; None is the engine's default. scope: the owner, for KV sharing; None shares no KV. progress:
    whether to send PrefillProgress events. compiled: the compiled grammar of `params`, if there is one; it is not
    pickled. tried: whether the grammar has been compiled before, perhaps in another process. token_texts: texts by id
    of tokens that the answer shows with another text than their own, such as the marks of calls.
    """

    prompt: list[int]
    params: SamplingParams
    mode: str | None = None
    scope: str | None = ""
    progress: bool = False
    compiled: CompiledGrammar | None = None
    tried: bool = False
    token_texts: Mapping[int, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        tried = self.tried or self.compiled is not None
        fields = self.prompt, self.params, self.mode, self.scope, self.progress, None, tried, self.token_texts
        return GenerationRequest, fields


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current load of an engine."""

    running: int
    waiting: int
    kv_tokens: int
    """Tokens in the KV cache of the running requests."""


class GenerationStream(Protocol):
    """Events of one request. Iterate once, in the event loop that submitted it."""

    @property
    def waited(self) -> float | None:
        """Seconds in the queue; None while it waits."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the events, a RequestOutput last. Raises TriforceError, ShuttingDown, ReplicaLost, or the error that
        ended the engine."""

    def cancel(self) -> None:
        """Stop at the engine's next step, and free the KV. A finished stream is unaffected."""


class EngineClient(Protocol):
    """Generates texts. All methods are called from one event loop and return at once, except `close`."""

    def submit(self, generations: list[GenerationRequest]) -> Sequence[GenerationStream]:
        """Queue all of the requests, or none and raise QueueFull or ShuttingDown."""

    def load(self) -> EngineLoad:
        """Return the current load."""

    @property
    def alive(self) -> bool:
        """Whether the engine can still generate texts."""

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None."""

    def drain(self) -> None:
        """Accept no new requests; finish the accepted ones."""

    def stop(self) -> None:
        """Accept no new requests, and end the accepted ones with ShuttingDown."""

    async def close(self) -> None:
        """Stop, and wait until the engine has ended."""
