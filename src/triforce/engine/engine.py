"""Engine: many requests at a time on one `EngineCore`, and the pieces of text that come of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from triforce.disk_cache.prompt_file import SavedCache
from triforce.engine.engine_core import EngineCore
from triforce.engine.output_stream import OutputChunk, OutputStream
from triforce.engine.program_end import native_work
from triforce.engine.reading_history import ReadingHistory
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import OnPrefill, SequenceGroup
from triforce.errors import RequestError
from triforce.interface.outputs import KVMemoryUsage, RequestOutput
from triforce.kvcache import FullView

Event = OutputChunk | RequestOutput | Exception
"""Pieces of the texts of a request as they are ready, and at the end the whole output, or an error."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to its outputs, in a mode."""

    prompt: list[int]
    streams: list[OutputStream]
    """One for each of the `n` completions."""
    mode: str
    coupling: str
    kv: KVMemoryUsage = field(default_factory=KVMemoryUsage)
    kv_dtype: str = ""
    groups: list[SequenceGroup] = field(default_factory=list)
    """Its sequences: as many together as there are rows."""
    reread: str = ""
    """Why no more of its prompt had been read before."""
    text: str | None = None
    """Prompt as it was given, where that was a text."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequence of each completion."""
        return [stream.sequence for stream in self.streams]

    @property
    def done(self) -> bool:
        """Whether every sequence is finished."""
        return all(sequence.finish for sequence in self.sequences)

    @property
    def error(self) -> Exception | None:
        """Reason why it ended before its time."""
        return next((group.error for group in self.groups if group.error), None)

    @property
    def started(self) -> float | None:
        """Time at which its turn came, by `perf_counter`."""
        return self.groups[0].started if self.groups else None

    def output(self) -> RequestOutput:
        """Return the whole answer of a request that is done."""
        first, stream = self.sequences[0], self.streams[0]
        scored = [entry and stream.with_texts(entry) for entry in first.prompt_logprobs]
        return RequestOutput(
            prompt_token_ids=self.prompt,
            prompt_logprobs=scored if first.params.prompt_logprobs is not None else None,
            outputs=[stream.output() for stream in self.streams],
            mode=self.mode,
            coupling=self.coupling,
            exactness="bitwise" if all(sequence.bitwise for sequence in self.sequences) else "distribution",
            prefill_seconds=sum(max(each.prefill_seconds for each in group.sequences) for group in self.groups),
            decode_seconds=sum(max(each.decode_seconds for each in group.sequences) for group in self.groups),
            kv=self.kv,
            kv_dtype=self.kv_dtype,
            cached_tokens=self.groups[0].cached,
            reread=self.reread,
            prompt=self.text,
        )


class Engine:
    """Requests on an engine core: `submit` them, then `step` until they are done; `cancel` ends one before."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._requests: list[Request] = []
        self._history = ReadingHistory(core.disk)
        self._streams: dict[TokenSequence, tuple[Request, OutputStream]] = {}

    def submit(
        self,
        requests: Sequence[Request],
        memory: FullView | None = None,
        saved: SavedCache | None = None,
        on_prefill: OnPrefill | None = None,
        on_read: Callable[[FullView], None] | None = None,
    ) -> None:
        """Queue requests, all or none. Raises CacheError where one can never fit.

        on_prefill: gets the progress of all prompts together. on_read: gets the view of the first. The others are those
        of `SequenceGroup`.
        """
        rows = self.core.store.rows
        for request in requests:
            texts = request.sequences
            parts = [texts[first : first + rows] for first in range(0, len(texts), rows)]
            request.groups = [SequenceGroup(part, request.mode) for part in parts]
        groups = [group for request in requests for group in request.groups]
        for group in groups:
            group.memory, group.saved = memory, saved
        for request, report in zip(requests, _reports(requests, on_prefill), strict=True):
            request.groups[0].on_prefill = report  # whose texts start from one prompt
        groups[0].on_read = on_read
        self.core.submit(groups)
        for request in requests:
            self._streams |= {stream.sequence: (request, stream) for stream in request.streams}
        self._requests += requests

    def cancel(self, request: Request) -> None:
        """Stop a request, and give its KV back at once. Harmless when it is done."""
        if request in self._requests:
            self._requests.remove(request)
            for group in request.groups:
                self.core.cancel(group)
            for sequence in request.sequences:
                del self._streams[sequence]

    @native_work()
    def step(self) -> list[tuple[Request, Event]]:
        """Make all texts a little longer. Returns what came of each request: last its output, or an error."""
        events: list[tuple[Request, Event]] = []
        for sequence, count in self.core.step():
            if sequence in self._streams:  # else its request has failed in this step
                request, stream = self._streams[sequence]
                try:
                    events.append((request, stream.take(count, self.core.finish)))
                except RequestError as error:  # this text cannot go on, the others can
                    self.cancel(request)
                    events.append((request, error))
        for request in [request for request in self._requests if request.error or request.done]:
            self.cancel(request)
            request.kv, request.kv_dtype = self.core.store.pool.bytes, self.core.store.pool.kv_dtype
            self._explain(request)
            events.append((request, request.error or request.output()))
        return events

    def _explain(self, request: Request) -> None:
        """Note why the prompt of a request was read, where its text is shared and its KV not its owner's."""
        first, group = request.sequences[0], request.groups[0]
        if first.scope is not None and group.memory is None and not request.error:
            slow = first.disk is not None and first.disk.given_up
            request.reread = self._history.why(first.scope, request.prompt, group.cached, slow_disk=slow)
            self._history.note(first.scope, [*request.prompt, *first.tokens])

    def finish(self, request: Request) -> RequestOutput:
        """Step until a request is done, and return its output. Raises what ended it."""
        while self.busy:
            for one, event in self.step():
                if one is request and isinstance(event, Exception):
                    raise event
                if one is request and isinstance(event, RequestOutput):
                    return event
        raise AssertionError("a request ends with its output")

    @property
    def busy(self) -> bool:
        """Whether there are requests that are not done."""
        return bool(self._requests)

    def close(self) -> None:
        """Cancel all requests."""
        self._requests.clear()
        self._streams.clear()
        self.core.close()


def _reports(requests: Sequence[Request], on_prefill: OnPrefill | None) -> list[OnPrefill | None]:
    """Return for each request a callback that hands `on_prefill` the progress of all requests together.

    Each prompt counts once, however many texts go on from it: those behind the first copy what it has read.
    """
    if on_prefill is None:
        return [None] * len(requests)
    sizes = [len(request.prompt) - 1 for request in requests]
    seen = [0] * len(requests)

    def report(i: int, tokens: int, _: int) -> None:
        seen[i] = min(tokens, sizes[i])
        on_prefill(sum(seen), sum(sizes))

    return [partial(report, i) for i in range(len(requests))]
