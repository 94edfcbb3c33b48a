"""Engine: runs many requests at a time on one `EngineCore`, and turns their tokens into chunks of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from triforce.backends.kernel_api import pages_for
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.disk_cache.prompt_file import SavedCache
from triforce.disk_cache.write_queue import PATIENCE
from triforce.engine import MAX_ITL, MOST_ROWS
from triforce.engine.engine_core import EngineCore
from triforce.engine.engine_parts import EngineParts, compare
from triforce.engine.program_end import EndingGenerator, native_work
from triforce.engine.reading_history import ReadingHistory
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import OnPrefill, SequenceGroup
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError, RequestError, argument, require_bool
from triforce.interface.byte_size import named_path
from triforce.interface.explain import json_value
from triforce.interface.frozen_fields import fields_frozen
from triforce.interface.outputs import (
    CompletionOutput,
    DecodingSnapshot,
    Interruption,
    KVMemoryUsage,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from triforce.kvcache import FullView, PagePool


@fields_frozen
@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Text that is ready to show, its tokens, and the name of the tier that proposed each.

    To show a text as it grows: `for piece in llm.stream(prompt): print(piece, end="", flush=True)`.
    """

    text: str
    token_ids: list[int]
    origins: list[str]
    index: int
    """Index among the `n` completions."""
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if requested."""
    characters: list[int] = field(default_factory=list)
    """Characters that each token adds to the text. Possible stop strings may hold some of them back."""
    trace: DecodingSnapshot | None = None
    """State of the decoding, if requested."""

    def __str__(self) -> str:
        """Return the text, so that `"".join(map(str, stream))` is the whole text."""
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. None is the logarithm of a probability of zero."""
        return dict(json_value(self))


class OutputStream:
    """Detokenizes one sequence of an engine as it grows. Without a tokenizer there are tokens but no text."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._logprobs = list[TokenLogprobs]()
        self._stream = tokenizer.stream(prefix_ids=sequence.prompt) if tokenizer else None
        self._text = StopStringBuffer(sequence.params.stop)

    def take(self, count: int, finish: Callable[[TokenSequence, int], None]) -> OutputChunk:
        """Read the last `count` tokens of the sequence, and return the text that is ready to show.

        finish: called with the sequence and the number of surplus tokens when a stop string is complete. Raises
        RequestError if the text does not satisfy its grammar, which became too complex.
        """
        sequence = self.sequence
        if sequence.constraint and (failure := sequence.constraint.failure):
            raise RequestError(f"the grammar became too complex at token {len(sequence.tokens)}: {failure}")
        # copies, as a stop string cuts the sequence's lists
        new_tokens = sequence.tokens[-count:]
        origins = sequence.origins[-count:]
        shown = ""
        characters = list[int]()
        for token in new_tokens:
            text = self._stream.step(token) if self._stream else ""
            shown += self._text.add(text)
            characters.append(len(text))
            if self._text.stopped:
                finish(sequence, count - len(characters))
                break
        token_count = len(characters)
        if sequence.finish and self._stream:
            final_text = self._stream.flush()
            characters[-1] += len(final_text)
            shown += self._text.add(final_text) + self._text.flush()
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = [self.with_texts(entry) for entry in sequence.logprobs[-token_count:]]
            self._logprobs += logprobs
        return OutputChunk(
            shown,
            new_tokens[:token_count],
            origins[:token_count],
            sequence.choice,
            sequence.finish,
            logprobs,
            characters,
            sequence.trace,
        )

    def with_texts(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Return log-probabilities with the texts of their tokens, if there is a tokenizer."""
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
    """Releases text as soon as no stop string can begin in it. A stop string itself is never released."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Append a piece of text. Returns the text that can be shown now: none after a stop."""
        if self.stopped:
            return ""
        self._held += piece
        stop_places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if stop_places:
            self.stopped = True
            return self._show(min(stop_places))
        return self._show(len(self._held) - partial_match(self._held, self._stops))

    def flush(self) -> str:
        """Return the text that was held back. Called at the end of the text."""
        return "" if self.stopped else self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown = self._held[:length]
        self._held = self._held[length:]
        self.text += shown
        return shown


def partial_match(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of one of `stops`."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


Event = OutputChunk | RequestOutput | Exception
"""Output of a request: chunks of text as they are ready, and at the end the whole output, or an error."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt in one mode, and the state of its `n` completions."""

    prompt: list[int]
    streams: list[OutputStream]
    """One stream for each of the `n` completions."""
    mode: str
    coupling: str
    kv: KVMemoryUsage = field(default_factory=KVMemoryUsage)
    kv_dtype: str = ""
    groups: list[SequenceGroup] = field(default_factory=list)
    """The sequences of the request, in groups of at most as many as there are rows."""
    reread: str = ""
    """Reason why no more of the prompt could be reused; "" if there is none."""
    text: str | None = None
    """The prompt, if the caller gave it as a text."""

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
        """Error that ended the request early; None: there is none."""
        return next((group.error for group in self.groups if group.error), None)

    @property
    def started(self) -> float | None:
        """Time of its admission, by `perf_counter`; None before."""
        return self.groups[0].started if self.groups else None

    def output(self) -> RequestOutput:
        """Return the whole output of a request that is done."""
        first_sequence = self.sequences[0]
        stream = self.streams[0]
        scored = [entry and stream.with_texts(entry) for entry in first_sequence.prompt_logprobs]
        return RequestOutput(
            prompt_token_ids=self.prompt,
            prompt_logprobs=scored if first_sequence.params.prompt_logprobs is not None else None,
            outputs=[stream.output() for stream in self.streams],
            mode=self.mode,
            coupling=self.coupling,
            exactness="bitwise" if all(sequence.bitwise for sequence in self.sequences) else "distribution",
            prefill_seconds=sum(max(member.prefill_seconds for member in group.sequences) for group in self.groups),
            decode_seconds=sum(max(member.decode_seconds for member in group.sequences) for group in self.groups),
            kv=self.kv,
            kv_dtype=self.kv_dtype,
            cached_tokens=self.groups[0].cached,
            reread=self.reread,
            prompt=self.text,
        )


class Engine:
    """Runs requests on an engine core: `submit` them, then `step` until they are done. `cancel` ends one early.

    rows: texts at a time. pages: of KV. turn, max_itl: see `EngineCore`. pool: an existing pool to use.
    """

    def __init__(
        self,
        parts: EngineParts,
        rows: int,
        pages: int,
        turn: int | None = None,
        max_itl: float = MAX_ITL,
        pool: PagePool | None = None,
    ) -> None:
        store = SharedKV(parts.pair.decoders, parts.speculation, rows, pages, pool)
        self.core = EngineCore(store, parts.coupling, parts.costs, turn, max_itl, parts.disk_prefixes(store))
        self._ranks = parts.ranks
        self._requests: list[Request] = []
        self._history = ReadingHistory(self.core.disk)
        self._streams: dict[TokenSequence, tuple[Request, OutputStream]] = {}
        self._end_reason = ""
        """Reason why no request runs any more; empty while requests run."""

    def run(
        self,
        requests: Sequence[Request],
        memory: FullView | None = None,
        saved: SavedCache | None = None,
        on_prefill: OnPrefill | None = None,
        on_read: Callable[[FullView], None] | None = None,
    ) -> Generator[tuple[Request, OutputChunk | RequestOutput], None, None]:
        """Submit requests, and yield the chunks and the output of each, until all are done or the iterator is closed.

        Raises the error that ends a request, or RequestError with the reason given to `end`.
        """
        self.submit(requests, memory, saved, on_prefill, on_read)
        faults: tuple[type[Exception], ...] = ()
        try:
            while self.busy:
                if self._end_reason:
                    raise RequestError(self._end_reason)
                if self._ranks.count > 1:
                    self._ranks.broadcast(None)  # rank 0 may have waited for the consumer of its text
                for request, event in self._step():
                    if isinstance(event, Exception):
                        raise event
                    yield request, event
        except KeyboardInterrupt:
            faults = (Exception,)  # it may have interrupted a change of rows, after which a batch is unusable
            raise
        finally:
            with suppress(*faults):
                for request in requests:
                    self.cancel(request)
                until = perf_counter() + PATIENCE
                self.core.write_behind(lambda: bool(self._end_reason) or perf_counter() > until)

    def end(self, reason: str) -> None:
        """Make `run` raise RequestError with a reason instead of its next step. Any thread may call this."""
        self._end_reason = reason

    def submit(
        self,
        requests: Sequence[Request],
        memory: FullView | None = None,
        saved: SavedCache | None = None,
        on_prefill: OnPrefill | None = None,
        on_read: Callable[[FullView], None] | None = None,
    ) -> None:
        """Queue requests, all or none. Raises CacheError if one can never fit, and RequestError after `close`.

        on_prefill: called with the progress of all prompts together. on_read: called with the full view of the first
        prompt. memory, saved: see `SequenceGroup`.
        """
        if self._end_reason:
            raise RequestError(self._end_reason)
        if isinstance(requests, Request):
            raise TypeError("submit takes a list of requests; pass [request]")
        rows = self.core.store.rows
        for request, report in zip(requests, _reports(requests, on_prefill), strict=True):
            texts = request.sequences
            when_read = on_read if request is requests[0] else None
            # The texts of later groups start from the prompt that the first one reads.
            request.groups = [
                SequenceGroup(
                    texts[start : start + rows],
                    request.mode,
                    memory,
                    saved,
                    on_prefill=None if start else report,
                    on_read=None if start else when_read,
                )
                for start in range(0, len(texts), rows)
            ]
        self.core.submit([group for request in requests for group in request.groups])
        for request in requests:
            self._streams |= {stream.sequence: (request, stream) for stream in request.streams}
        self._requests += requests

    def cancel(self, request: Request) -> None:
        """Stop a request, and free its KV at once. No effect when it is done."""
        if request in self._requests:
            self._requests.remove(request)
            for group in request.groups:
                self.core.cancel(group)
            for sequence in request.sequences:
                del self._streams[sequence]

    @native_work()
    def step(self) -> list[tuple[Request, Event]]:
        """Run one step of all texts. Returns the new events of requests; the last of each is its output or an error."""
        return self._step()

    def _step(self) -> list[tuple[Request, Event]]:
        events: list[tuple[Request, Event]] = []
        for sequence, count in self.core.step():
            if sequence in self._streams:  # else its request failed earlier in this step
                request, stream = self._streams[sequence]
                try:
                    events.append((request, stream.take(count, self.core.finish)))
                except RequestError as error:  # only this text cannot go on
                    self.cancel(request)
                    events.append((request, error))
        for request in [request for request in self._requests if request.error or request.done]:
            self.cancel(request)
            request.kv = self.core.store.pool.bytes
            request.kv_dtype = self.core.store.pool.kv_dtype
            self._explain(request)
            events.append((request, request.error or request.output()))
        return events

    def _explain(self, request: Request) -> None:
        """Set why the prompt was read, if its text may be shared and it does not continue a caller's view."""
        sequence = request.sequences[0]
        group = request.groups[0]
        if sequence.scope is None or group.memory is not None or request.error:
            return
        slow = sequence.disk is not None and sequence.disk.given_up
        request.reread = self._history.reread_reason(sequence.scope, request.prompt, group.cached, slow_disk=slow)
        if request.reread and sequence.params.prompt_logprobs is not None:
            request.reread = "log-probabilities of its tokens were asked for, which only reading gives"
        self._history.record(sequence.scope, [*request.prompt, *sequence.tokens])

    def finish(self, request: Request) -> RequestOutput:
        """Step until a request is done, and return its output. Raises the error that ended it."""
        while self.busy:
            for event_request, event in self.step():
                if event_request is request and isinstance(event, Exception):
                    raise event
                if event_request is request and isinstance(event, RequestOutput):
                    return event
        raise AssertionError("a request ends with its output")

    @property
    def busy(self) -> bool:
        """Whether there are unfinished requests."""
        return bool(self._requests)

    def close(self) -> None:
        """Cancel all requests. Later ones are refused."""
        self._end_reason = self._end_reason or "this engine is closed; open another with LLM.open"
        self._requests.clear()
        self._streams.clear()
        self.core.close()


def _reports(requests: Sequence[Request], on_prefill: OnPrefill | None) -> list[OnPrefill | None]:
    """Return a callback for each request that calls `on_prefill` with the progress of all requests together.

    Each prompt counts once for all its texts, as the later ones copy the KV of the first.
    """
    if on_prefill is None:
        return [None] * len(requests)
    sizes = [len(request.prompt) - 1 for request in requests]
    tokens_read = [0] * len(requests)

    def report(i: int, tokens: int, _: int) -> None:
        tokens_read[i] = min(tokens, sizes[i])
        on_prefill(sum(tokens_read), sum(sizes))

    return [partial(report, i) for i in range(len(requests))]


SPARE = 64, 1 / 16
"""Spare pages of an engine, at least, and as a share of its pages: the next prompt on a document may be longer."""


class EngineLender:
    """Lends engines of the same parts to the calls of an LLM, and keeps the last one for the next call."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._idle: Engine | None = None
        self._lent: set[Engine] = set()
        self._end_reason = ""
        """Reason why no engine is lent any more; empty while engines are lent."""

    def run(
        self,
        requests: Sequence[Request],
        on_prefill: OnPrefill | None,
        save: str | Path | None,
        load: str | Path | None,
        memory: FullView | None = None,
    ) -> Iterator[tuple[Request, OutputChunk | RequestOutput]]:
        """Run requests on one engine, and yield the events of each: chunks of text, and at the end its output.

        save, load: files for the KV of the first prompt, and of an earlier one (see `disk_cache.prompt_file`).
        Closing the iterator, or dropping it, cancels all requests. Raises TriforceError, and any exception that
        `on_prefill` raises.
        """
        files = named_path("save_cache", save), named_path("load_cache", load)
        return EndingGenerator(self._run(requests, on_prefill, *files, memory))

    def _run(
        self,
        requests: Sequence[Request],
        on_prefill: OnPrefill | None,
        save: Path | None,
        load: Path | None,
        memory: FullView | None,
    ) -> Generator[tuple[Request, OutputChunk | RequestOutput], None, None]:
        parts = self.parts
        if parts.ranks.count > 1 and (save or load):
            raise RequestError(
                f"a saved KV cache is of one process; leave out {argument('ranks')} and torchrun, or the file"
            )
        facts = [(r.prompt, r.mode, r.sequences[0].params, r.sequences[0].seed) for r in requests]
        compare(parts.ranks, "requests", facts)
        context = parts.pair.target.config.context
        reach = parts.speculation.reach
        sizes = sorted(
            pages_for(sequence.capacity(context, reach)) for request in requests for sequence in request.sequences
        )
        rows = min(len(sizes), MOST_ROWS)
        pages = sum(sizes[-MOST_ROWS:])
        with self._lend(rows, pages, memory, reuse=not (save or load or memory)) as engine:
            pool = engine.core.store.pool
            saved = parts.open_prompt(load, pool) if load else None
            on_read = parts.prompt_saver(save, pool, requests[0].prompt) if save else None
            yield from engine.run(requests, memory, saved, on_prefill, on_read)

    def close(self, reason: str) -> None:
        """Free all memory, and write the queue of the disk cache. Running requests end with `reason`."""
        self._end(reason)
        self.clear()
        if self.parts.disk:
            self.parts.disk.close()

    def abandon(self, reason: str) -> None:
        """End requests with `reason`, and leave the disk cache to the parent process. Called after a fork."""
        self._end(reason)
        if self.parts.disk:
            self.parts.disk.close.detach()

    def _end(self, reason: str) -> None:
        self._end_reason = reason
        for engine in list(self._lent):
            engine.end(reason)

    def clear(self) -> None:
        """Free the idle engine, with the prefixes that it has read."""
        if self._idle:
            self._idle.close()
        self._idle = None

    @contextmanager
    def _lend(self, rows: int, pages: int, memory: FullView | None, reuse: bool) -> Iterator[Engine]:
        """Lend an engine. reuse: lend the idle one if it fits, and keep it afterwards unless there was an error."""
        if self._end_reason:
            raise RequestError(self._end_reason)
        engine = (
            self._idle_or_new(rows, pages)
            if reuse
            else Engine(self.parts, rows, pages, pool=memory.pool if memory else None)
        )
        self._lent.add(engine)
        try:
            yield engine
        except GeneratorExit:  # a stream that is closed between two steps
            self._give_back(engine, reuse)
            raise
        except BaseException as error:
            with suppress(*(Exception,) if isinstance(error, KeyboardInterrupt) else ()):
                engine.close()
            raise
        else:
            self._give_back(engine, reuse)
        finally:
            self._lent.discard(engine)

    def _give_back(self, engine: Engine, reuse: bool) -> None:
        if reuse and not self._end_reason:
            self._idle = engine
        else:
            engine.close()

    def _idle_or_new(self, rows: int, pages: int) -> Engine:
        """Return the idle engine if it is large enough, or else a new one."""
        if self._idle and self._idle.core.store.rows >= rows and self._idle.core.store.pages >= pages:
            engine = self._idle
            self._idle = None
            return engine
        self.clear()
        # With offloaded KV, unused pages would take memory from resident pages.
        spare_pages = max(SPARE[0], int(pages * SPARE[1])) if self.parts.speculation.offload.kind == "none" else 0
        try:
            return Engine(self.parts, rows, pages + spare_pages)
        except CacheError:
            return Engine(self.parts, rows, pages)


def collected(
    requests: Sequence[Request], events: Iterable[tuple[Request, Event]], use_tqdm: bool | None
) -> list[RequestOutput]:
    """Return the output of each request, in order. Raises Interruption, which holds the finished outputs."""
    from tqdm import tqdm

    if use_tqdm is not None:
        require_bool("use_tqdm", use_tqdm)
    outputs: dict[Request, RequestOutput] = {}
    shown = len(requests) > 1 and _is_watched() if use_tqdm is None else use_tqdm
    with tqdm(desc="generate", total=len(requests), unit=" prompts", disable=not shown, file=sys.stderr) as bar:
        try:
            for request, event in events:
                if isinstance(event, RequestOutput):
                    outputs[request] = event
                    bar.update()
        except KeyboardInterrupt as error:
            raise Interruption([outputs.get(request) for request in requests]) from error
    return [outputs[request] for request in requests]


def _is_watched() -> bool:
    """Whether stderr is a terminal, or the output of a notebook cell."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
