"""Many requests at a time on one engine: what a request is, and the pieces of text that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triforce.engine.engine_core import EngineCore
from triforce.engine.output_stream import OutputChunk, OutputStream
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import OnPrefill, SequenceGroup
from triforce.errors import RequestError
from triforce.interface.outputs import KVMemoryUsage, RequestOutput
from triforce.kvcache import FullView
from triforce.kvcache.prompt_file import SavedCache

Event = OutputChunk | RequestOutput | Exception
"""Pieces of the texts of a request as they are ready, and at the end the whole, or what went wrong."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to its outputs, in a mode."""

    prompt: list[int]
    completions: list[OutputStream]
    mode: str
    coupling: str
    kv: KVMemoryUsage = field(default_factory=KVMemoryUsage)
    groups: list[SequenceGroup] = field(default_factory=list)
    """Its jobs: as many together as there are rows."""

    @property
    def sequences(self) -> list[TokenSequence]:
        return [completion.sequence for completion in self.completions]

    @property
    def done(self) -> bool:
        return all(sequence.finish for sequence in self.sequences)

    @property
    def error(self) -> Exception | None:
        return next((group.error for group in self.groups if group.error), None)

    @property
    def started(self) -> float | None:
        """When its turn came, by `perf_counter`."""
        return self.groups[0].started if self.groups else None

    def output(self) -> RequestOutput:
        """The whole answer, once it is done."""
        first = self.sequences[0]
        return RequestOutput(
            prompt_token_ids=self.prompt,
            prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs is not None else None,
            outputs=[completion.output() for completion in self.completions],
            mode=self.mode,
            coupling=self.coupling,
            exactness="bitwise" if all(sequence.bitwise for sequence in self.sequences) else "distribution",
            prefill_seconds=sum(max(sequence.prefill_seconds for sequence in group.sequences) for group in self.groups),
            decode_seconds=sum(max(sequence.decode_seconds for sequence in group.sequences) for group in self.groups),
            kv=self.kv,
            cached_tokens=self.groups[0].cached,
        )


class Engine:
    """Requests come by `submit` and go by `cancel` or when they are done; `step` makes their texts a little longer."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._requests: list[Request] = []
        self._of: dict[TokenSequence, tuple[Request, OutputStream]] = {}

    def submit(
        self,
        requests: Sequence[Request],
        memory: FullView | None = None,
        earlier: SavedCache | None = None,
        on_prefill: OnPrefill | None = None,
        on_read: Callable[[FullView], None] | None = None,
    ) -> None:
        """Queue requests, all or none. Raises CacheError where one can never fit.

        `on_prefill` is told of all prompts together, `on_read` of the first. For the others see `SequenceGroup`.
        """
        most = self.engine.store.rows
        for request in requests:
            request.groups = [SequenceGroup(sequences, request.mode) for sequences in _parts(request.sequences, most)]
        groups = [group for request in requests for group in request.groups]
        for group, told in zip(groups, _shares(groups, on_prefill), strict=True):
            group.memory, group.earlier, group.on_prefill = memory, earlier, told
        groups[0].on_read = on_read
        self.engine.submit(groups)
        for request in requests:
            self._of |= {completion.sequence: (request, completion) for completion in request.completions}
        self._requests += requests

    def cancel(self, request: Request) -> None:
        """Nobody waits any more: the KV goes at once. Harmless when it is done."""
        if request in self._requests:
            self._requests.remove(request)
            for group in request.groups:
                self.engine.cancel(group)
            for sequence in request.sequences:
                del self._of[sequence]

    def step(self) -> list[tuple[Request, Event]]:
        """Make all texts a little longer. Returns what has come of each request: last its output, or an error."""
        events: list[tuple[Request, Event]] = []
        for sequence, count in self.engine.step():
            if sequence in self._of:  # else its request has failed in this step
                request, completion = self._of[sequence]
                try:
                    events.append((request, completion.take(count, self.engine.finish)))
                except RequestError as error:  # this text cannot go on, the others can
                    self.cancel(request)
                    events.append((request, error))
        for request in [request for request in self._requests if request.error or request.done]:
            self.cancel(request)
            request.kv = self.engine.store.kv
            events.append((request, request.error or request.output()))
        return events

    def finish(self, request: Request) -> RequestOutput:
        """Steps until a request is done, whatever else is. Raises what ended it."""
        while self.busy:
            for one, event in self.step():
                if one is request and isinstance(event, Exception):
                    raise event
                if one is request and isinstance(event, RequestOutput):
                    return event
        raise AssertionError("a request ends with its output")

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def close(self) -> None:
        """Cancel all there are."""
        self._requests.clear()
        self._of.clear()
        self.engine.close()


def _parts(sequences: list[TokenSequence], most: int) -> list[list[TokenSequence]]:
    return [sequences[first : first + most] for first in range(0, len(sequences), most)]


def _shares(groups: Sequence[SequenceGroup], on_prefill: OnPrefill | None) -> list[OnPrefill | None]:
    """For each group what tells `on_prefill` of all of them together."""
    if on_prefill is None:
        return [None] * len(groups)
    sizes = [sum(len(sequence.prompt) - 1 for sequence in group.sequences) for group in groups]
    seen = [0] * len(groups)

    def share(i: int) -> OnPrefill:
        def told(tokens: int, total: int) -> None:
            seen[i] = tokens
            on_prefill(sum(seen), sum(sizes))

        return told

    return [share(i) for i in range(len(groups))]
