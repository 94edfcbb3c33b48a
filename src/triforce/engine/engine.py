"""Engine: runs many requests at a time on one `EngineCore`, and turns their tokens into chunks of text.

Models, costs and the disk cache are made once per `LLM` (`EngineParts`). The page pool, the prefix cache and the
scheduler are made once per engine. Tiers, their views and the sampler are made for each group of a request, as a
`SequenceBatch`; after its prefill the group's rows join the running batch of its mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from triforce.backends.kernel_api import pages_for
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.disk_cache.prompt_file import SavedCache
from triforce.disk_cache.write_queue import PATIENCE
from triforce.engine import MAX_ITL, MAX_ROWS
from triforce.engine.engine_core import EngineCore
from triforce.engine.engine_parts import EngineParts, compare
from triforce.engine.program_end import EndingGenerator, native_work
from triforce.engine.reading_history import ReadingHistory
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import OnPrefill, SequenceGroup
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError, RequestError, argument, require_bool
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
from triforce.interface.quantities import named_path
from triforce.kvcache import FullView, PagePool

if TYPE_CHECKING:
    from tqdm import tqdm


@fields_frozen
@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Text that is ready to show, its tokens, and the name of the tier that proposed each.

    To show a text as it grows: `for piece in llm.stream(prompt): print(piece, end="", flush=True)`.
    """

    text: str
    """Text that is ready to show, perhaps an empty one."""
    token_ids: list[int]
    """New tokens since the previous chunk."""
    origins: list[str]
    """Name of the tier that proposed each new token."""
    index: int
    """Index among the `n` completions."""
    finish_reason: Literal["stop", "length"] | None = None
    """As in `CompletionOutput`, in the last chunk of a completion; None before."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if requested."""
    characters: list[int] = field(default_factory=list)
    """Characters that each token adds, including those held back for a possible stop string or dropped by a stop."""
    trace: DecodingSnapshot | None = None
    """State of the decoding, if requested."""

    def __str__(self) -> str:
        """Return the text, so that `"".join(map(str, stream))` is the whole text."""
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. The log-probability of an impossible token, -inf, becomes None."""
        return dict(json_value(self))


class OutputStream:
    """Detokenizes one sequence of an engine as it grows. Without a tokenizer there are tokens but no text."""

    def __init__(
        self, sequence: TokenSequence, tokenizer: Tokenizer | None, token_texts: Mapping[int, str] | None = None
    ) -> None:
        """token_texts: see `Tokenizer.stream`."""
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._logprobs = list[TokenLogprobs]()
        self._stream = tokenizer.stream(sequence.prompt, token_texts) if tokenizer else None
        self._text = StopStringBuffer(sequence.params.stop)

    def take(self, count: int, end_sequence: Callable[[TokenSequence, int], None]) -> OutputChunk:
        """Read the last `count` tokens of the sequence, and return the text that is ready to show.

        end_sequence: called at a complete stop string, with the sequence and the number of tokens after the string.
        Raises RequestError if the grammar became too complex to constrain the rest of the text.
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
            if self._text.stop is not None:
                end_sequence(sequence, count - len(characters))
                break
        token_count = len(characters)
        if sequence.finish_reason and self._stream:
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
            sequence.finish_reason,
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
            sequence.finish_reason or "length",
            self._logprobs if sequence.params.logprobs is not None else None,
            sequence.origins,
            sequence.seed,
            sequence.tiers,
            sequence.timeline,
            sequence.report,
            self._text.stop,
        )


class StopStringBuffer:
    """Releases text as soon as no stop string can begin in it. A stop string itself is never released."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.text = ""
        self.stop: str | None = None
        """The stop string that has ended the text."""

    def add(self, piece: str) -> str:
        """Append a piece of text. Returns the text that can be shown now: none after a stop."""
        if self.stop is not None:
            return ""
        self._held += piece
        stop_places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if stop_places:
            place, self.stop = min(stop_places)
            return self._show(place)
        return self._show(len(self._held) - partial_match(self._held, self._stops))

    def flush(self) -> str:
        """Return the text that was held back. Called at the end of the text."""
        return self._show(len(self._held)) if self.stop is None else ""

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
    """One prompt in one mode, and the state of its `n` completions. `LLM.request` makes it; an engine runs it once."""

    parts: EngineParts
    """Models of the LLM that made the request. Only engines of that LLM run it."""
    prompt: list[int]
    """Token ids of the prompt."""
    streams: list[OutputStream]
    """One stream for each of the `n` completions."""
    mode: str
    """Name of the mode: the tiers that may run."""
    coupling: str
    """Verification of draft tokens: seeded, rejection or block."""
    kv: KVMemoryUsage = field(default_factory=KVMemoryUsage)
    """Memory of the target's KV in this engine, in bytes, at the end of the request."""
    kv_dtype: str = ""
    """Name of the type of the target's keys and values, set at the end of the request."""
    weight_inputs: str = ""
    """Name of the type of the target's rounded inputs, set at the end of the request."""
    groups: list[SequenceGroup] = field(default_factory=list)
    """The sequences of the request, in groups. No group has more sequences than the engine has rows."""
    reread: str = ""
    """Reason why the cache did not supply more of the prompt, see `Engine._set_reread`; "": no reason is given."""
    text: str | None = None
    """The prompt, if the caller gave it as a text."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequence of each completion."""
        return [stream.sequence for stream in self.streams]

    @property
    def done(self) -> bool:
        """Whether every sequence is finished."""
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def error(self) -> Exception | None:
        """Error that ended the request early; None: there is none."""
        return next((group.error for group in self.groups if group.error), None)

    @property
    def started(self) -> float | None:
        """Time at which the request was admitted, by `perf_counter`; None while it waits."""
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
            weight_inputs=self.weight_inputs,
            cached_tokens=self.groups[0].cached_prompt_tokens,
            reread=self.reread,
            prompt=self.text,
        )


class Engine:
    """Continuous batching: requests join and leave a batch between two steps. `LLM.open` makes an engine.

    `submit` queues requests. Each `step` prefills parts of waiting prompts, then lengthens every running text by the
    tokens of one verification. `cancel` ends a request between two steps. An engine serves one thread at a time.

    rows: sequences decoded at a time. pages: capacity of their KV in pages of 16 tokens. turn, max_itl: as in
    `LLM.open`. pool: an existing page pool; None allocates one. Raises CacheError if the KV does not fit.
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
        self._parts = parts
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

        Each item is a request and its chunk or output. Parameters are those of `submit`. Raises the error that ends a
        request, or RequestError with the reason given to `end`.
        """
        self.submit(requests, memory, saved, on_prefill, on_read)
        suppressed: tuple[type[Exception], ...] = ()
        try:
            while self.busy:
                if self._end_reason:
                    raise RequestError(self._end_reason)
                if self._ranks.count > 1:
                    self._ranks.broadcast(None)  # the other ranks wait here until the consumer of rank 0 goes on
                for request, event in self._step():
                    if isinstance(event, Exception):
                        raise event
                    yield request, event
        except KeyboardInterrupt:
            suppressed = (Exception,)  # the interrupt may have left a batch with half-changed rows
            raise
        finally:
            with suppress(*suppressed):
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
        """Queue requests, all or none.

        memory: a caller's full view to continue, such as a `Session`'s; `requests` then has one request of one
        sequence. saved: an opened file with the KV of a prompt; prompts that begin alike reuse that KV. on_prefill:
        called with the number of prefilled tokens and the number of all tokens, summed over all prompts. on_read:
        called with the full view of the first prompt once it is prefilled. Raises CacheError if a request needs more
        KV than the engine has, RequestError after `close` and for a request that was submitted before or that another
        LLM made, and TypeError for anything but a list of requests.
        """
        if self._end_reason:
            raise RequestError(self._end_reason)
        if isinstance(requests, Request):
            raise TypeError("submit takes a list of requests; pass [request]")
        for request in requests:
            self._require_own(request)
        if len(set(requests)) < len(requests) or any(request.groups for request in requests):
            raise RequestError("a request is submitted once; make another one with LLM.request")
        rows = self.core.store.rows
        groups_by_request = [
            [
                # Later groups of a request reuse the prompt's KV from the prefix cache, except with scope None, with
                # `prompt_logprobs` or with a saved file.
                SequenceGroup(
                    request.sequences[start : start + rows],
                    request.mode,
                    memory,
                    saved,
                    on_prefill=None if start else callback,
                    on_read=None if start or i else on_read,
                )
                for start in range(0, len(request.streams), rows)
            ]
            for i, (request, callback) in enumerate(
                zip(requests, _prefill_callbacks(requests, on_prefill), strict=True)
            )
        ]
        self.core.submit([group for groups in groups_by_request for group in groups])
        for request, groups in zip(requests, groups_by_request, strict=True):
            request.groups = groups
            self._streams |= {stream.sequence: (request, stream) for stream in request.streams}
        self._requests += requests

    def _require_own(self, request: Request) -> None:
        """Raise an error unless this engine can run `request`."""
        if not isinstance(request, Request):
            raise TypeError(f"{request!r:.60} is no request; LLM.request makes one from a prompt")
        if request.parts is not self._parts:
            raise RequestError("another LLM made this request; submit it to an engine of that LLM")

    def cancel(self, request: Request) -> None:
        """Stop a request, and free its rows at once. Its KV may stay in the prefix cache. No effect when it is done."""
        if request in self._requests:
            self._requests.remove(request)
            for group in request.groups:
                self.core.cancel(group)
            for sequence in request.sequences:
                del self._streams[sequence]

    @native_work()
    def step(self) -> list[tuple[Request, Event]]:
        """Run one step of all texts, and return the new events of requests.

        Each item is a request with a chunk, its output or the error that ended it. The last event of a request is its
        output or an error. Raises RankError where a rank that shares the model is lost.
        """
        return self._step()

    def _step(self) -> list[tuple[Request, Event]]:
        events: list[tuple[Request, Event]] = []
        for sequence, count in self.core.step():
            if sequence in self._streams:  # else its request failed earlier in this step
                request, stream = self._streams[sequence]
                try:
                    events.append((request, stream.take(count, self.core.finish)))
                except RequestError as error:  # this ends the request with all its texts; other requests go on
                    self.cancel(request)
                    events.append((request, error))
        for request in [request for request in self._requests if request.error or request.done]:
            self.cancel(request)
            request.kv = self.core.store.pool.bytes
            request.kv_dtype = self.core.store.pool.kv_dtype
            request.weight_inputs = self.core.store.pool.config.weight_inputs
            self._set_reread(request)
            events.append((request, request.error or request.output()))
        return events

    def _set_reread(self, request: Request) -> None:
        """Set `request.reread`, unless the request has no scope, failed, or continues a caller's view."""
        sequence = request.sequences[0]
        group = request.groups[0]
        if sequence.scope is None or group.memory is not None or request.error:
            return
        slow = sequence.disk is not None and sequence.disk.given_up
        cached_tokens = group.cached_prompt_tokens
        request.reread = self._history.reread_reason(sequence.scope, request.prompt, cached_tokens, slow_disk=slow)
        if request.reread and sequence.params.prompt_logprobs is not None:
            request.reread = "log-probabilities of its tokens were requested, which only a prefill gives"
        self._history.record(sequence.scope, [*request.prompt, *sequence.tokens])

    def finish(self, request: Request) -> RequestOutput:
        """Step until a submitted request is done, and return its output.

        Raises the error that ended it, and RequestError for a request that is not running.
        """
        while request in self._requests:
            for event_request, event in self.step():
                if event_request is request and isinstance(event, Exception):
                    raise event
                if event_request is request and isinstance(event, RequestOutput):
                    return event
        self._require_own(request)
        raise RequestError("this request is not running; submit a new one before finish")

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


def _prefill_callbacks(requests: Sequence[Request], on_prefill: OnPrefill | None) -> list[OnPrefill | None]:
    """Return one callback per request; each callback calls `on_prefill` with the progress of all requests together.

    The prompt of a request counts once for all its sequences: only the first group reports progress, and the progress
    is capped at the size of one prompt.
    """
    if on_prefill is None:
        return [None] * len(requests)
    sizes = [len(request.prompt) - 1 for request in requests]
    prefilled_tokens = [0] * len(requests)

    def update_progress(i: int, tokens: int, _: int) -> None:
        prefilled_tokens[i] = min(tokens, sizes[i])
        on_prefill(sum(prefilled_tokens), sum(sizes))

    return [partial(update_progress, i) for i in range(len(requests))]


MIN_SPARE_PAGES = 64
SPARE_PAGES_SHARE = 1 / 16
"""Spare pages of a new engine, as a share of its pages. With them a later, longer prompt can reuse the engine."""


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

        save: file to write the KV of the first prompt to. load: file with the KV of an earlier prompt, to start from
        (see `disk_cache.prompt_file`).
        Dropping the iterator cancels all requests. Raises TriforceError, and any exception that
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
                f"a saved KV cache needs a single process; leave out {argument('ranks')} and torchrun, or the file"
            )
        facts = [(r.prompt, r.mode, r.sequences[0].params, r.sequences[0].seed) for r in requests]
        compare(parts.ranks, "requests", facts)
        context = parts.pair.target.config.context
        reach = parts.speculation.reach
        sizes = sorted(
            pages_for(sequence.capacity(context, reach)) for request in requests for sequence in request.sequences
        )
        rows = min(len(sizes), MAX_ROWS)
        pages = sum(sizes[-MAX_ROWS:])
        with self._lend(rows, pages, memory, reuse=not (save or load or memory)) as engine:
            pool = engine.core.store.pool
            saved = parts.open_prompt(load, pool) if load else None
            on_read = parts.prompt_saver(save, pool, requests[0].prompt) if save else None
            yield from engine.run(requests, memory, saved, on_prefill, on_read)

    def close(self, reason: str) -> None:
        """Free the idle engine, and write the queue of the disk cache. Running requests end with `reason`."""
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
        """Free the idle engine and the prefixes that it caches."""
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
        offloads = self.parts.speculation.offload.kind != "none"
        spare_pages = 0 if offloads else max(MIN_SPARE_PAGES, int(pages * SPARE_PAGES_SHARE))
        try:
            return Engine(self.parts, rows, pages + spare_pages)
        except CacheError:
            return Engine(self.parts, rows, pages)


def collect_outputs(
    requests: Sequence[Request], events: Iterable[tuple[Request, Event]], use_tqdm: bool | None
) -> list[RequestOutput]:
    """Return the output of each request, in order. Raises Interruption, which holds the finished outputs."""
    if use_tqdm is not None:
        require_bool("use_tqdm", use_tqdm)
    outputs: dict[Request, RequestOutput] = {}
    shown = len(requests) > 1 and _is_watched() if use_tqdm is None else use_tqdm
    with _progress_bar(len(requests)) if shown else nullcontext() as bar:
        try:
            for request, event in events:
                if isinstance(event, RequestOutput):
                    outputs[request] = event
                    if bar is not None:
                        bar.update()
        except KeyboardInterrupt as error:
            raise Interruption([outputs.get(request) for request in requests]) from error
    return [outputs[request] for request in requests]


def _progress_bar(prompts: int) -> tqdm[NoReturn]:
    """Return a bar on stderr. Make one only where it is shown: tqdm opens a semaphore with it.

    Python reports the semaphore as leaked where a worker of multiprocessing is terminated.
    """
    from tqdm import tqdm

    return tqdm(desc="generate", total=prompts, unit=" prompts", file=sys.stderr)


def _is_watched() -> bool:
    """Whether stderr is a terminal, or the output of a notebook cell."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
