"""Engine: many requests at a time on one `EngineCore`, and the pieces of text that come of them."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from triforce.backends.kernel_api import pages_for
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.disk_cache.prefixes import MIN_TEXT_TOKENS, SEGMENT, DiskPrefixes
from triforce.disk_cache.prompt_file import SavedCache
from triforce.disk_cache.write_queue import PATIENCE
from triforce.engine import MAX_ITL, MOST_ROWS
from triforce.engine.engine_core import EngineCore
from triforce.engine.engine_parts import EngineParts, compare
from triforce.engine.program_end import EndingGenerator, native_work
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
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.kvcache.views.full import TAIL
from triforce.ragged import Ints, ints


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
        self.sequence = sequence
        self._tokenizer = tokenizer
        self._logprobs = list[TokenLogprobs]()
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
        # a stop string cuts the sequence's own
        fresh = sequence.tokens[-count:]
        origins = sequence.origins[-count:]
        shown = ""
        characters = list[int]()
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
        shown = self._held[:length]
        self._held = self._held[length:]
        self.text += shown
        return shown


def partial_match(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of one of `stops`, and not all of it."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


TEXTS, SCOPES = 4, 64
"""Texts that are remembered of a scope, and scopes: the latest."""


class ReadingHistory:
    """Latest texts of each scope, which new prompts are compared with. disk: keeps them for other processes, too."""

    def __init__(self, disk: DiskPrefixes | None = None) -> None:
        self._disk = disk
        self._texts: OrderedDict[str, deque[Ints]] = OrderedDict()

    def note(self, scope: str, text: Sequence[int]) -> None:
        """Remember a text, prompt and answer."""
        texts = self._latest(scope)
        texts.append(ints(list(text)))
        if self._disk and len(text) >= MIN_TEXT_TOKENS:
            self._disk.keep_latest(scope, [each for each in texts if len(each) >= MIN_TEXT_TOKENS])

    def _latest(self, scope: str) -> deque[Ints]:
        if scope not in self._texts:
            self._texts[scope] = deque(self._disk.latest(scope) if self._disk else (), maxlen=TEXTS)
        self._texts.move_to_end(scope)
        if len(self._texts) > SCOPES:
            self._texts.popitem(last=False)
        return self._texts[scope]

    def why(self, scope: str, prompt: Sequence[int], cached: int, *, slow_disk: bool = False) -> str:
        """Return why no more than `cached` tokens of a prompt were read before; "" where a segment at most was read.

        slow_disk: more of it is kept on disk, which was given up.
        """
        if len(prompt) - cached <= SEGMENT + TAIL:
            return ""
        if slow_disk:
            return f"behind its first {cached:,} tokens the disk is slower than reading again"
        ids = ints(list(prompt))
        common = max((_common(ids, text) for text in self._latest(scope)), default=0)
        if common > cached + SEGMENT:
            return f"its first {common:,} tokens were read before, but no longer kept"
        if common >= PAGE:
            return f"it differs from token {common + 1:,} on from what was read before"
        return "no more of it was kept" if cached else "nothing that was read lately begins like it"


def _common(a: Ints, b: Ints) -> int:
    """Return how many tokens two texts have in common at their start."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


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
        first = self.sequences[0]
        stream = self.streams[0]
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
    """Requests on an engine core: `submit` them, then `step` until they are done; `cancel` ends one before.

    rows: texts at a time. pages: of KV. turn, max_itl: see `EngineCore`. given: a pool to use.
    """

    def __init__(
        self,
        parts: EngineParts,
        rows: int,
        pages: int,
        turn: int | None = None,
        max_itl: float = MAX_ITL,
        given: PagePool | None = None,
    ) -> None:
        store = SharedKV(parts.pair.decoders, parts.speculation, rows, pages, given)
        self.core = EngineCore(store, parts.coupling, parts.costs, turn, max_itl, parts.disk_prefixes(store))
        self._ranks = parts.ranks
        self._requests: list[Request] = []
        self._history = ReadingHistory(self.core.disk)
        self._streams: dict[TokenSequence, tuple[Request, OutputStream]] = {}
        self._over = ""
        """Why no request runs any more; empty while they do."""

    def run(
        self,
        requests: Sequence[Request],
        memory: FullView | None = None,
        saved: SavedCache | None = None,
        on_prefill: OnPrefill | None = None,
        on_read: Callable[[FullView], None] | None = None,
    ) -> Generator[tuple[Request, OutputChunk | RequestOutput], None, None]:
        """Submit requests, and yield what comes of each, until all are done or the iterator is closed.

        Raises what ends a request, or RequestError with the reason that `end` was given.
        """
        self.submit(requests, memory, saved, on_prefill, on_read)
        faults: tuple[type[Exception], ...] = ()
        try:
            while self.busy:
                if self._over:
                    raise RequestError(self._over)
                if self._ranks.count > 1:
                    self._ranks.broadcast(None)  # rank 0 may have waited for the reader of its text
                for request, event in self._step():
                    if isinstance(event, Exception):
                        raise event
                    yield request, event
        except KeyboardInterrupt:
            faults = (Exception,)  # it may have come while rows left a batch, which cannot be asked any more then
            raise
        finally:
            with suppress(*faults):
                for request in requests:
                    self.cancel(request)
                until = perf_counter() + PATIENCE
                self.core.write_behind(lambda: bool(self._over) or perf_counter() > until)

    def end(self, reason: str) -> None:
        """Have `run` raise RequestError with a reason in place of its next step. Any thread may call this."""
        self._over = reason

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
        for request, report in zip(requests, _reports(requests, on_prefill), strict=True):
            texts = request.sequences
            when_read = on_read if request is requests[0] else None
            # The texts of later groups start from the prompt that the first one reads.
            request.groups = [
                SequenceGroup(
                    texts[first : first + rows],
                    request.mode,
                    memory,
                    saved,
                    on_prefill=None if first else report,
                    on_read=None if first else when_read,
                )
                for first in range(0, len(texts), rows)
            ]
        self.core.submit([group for request in requests for group in request.groups])
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
        return self._step()

    def _step(self) -> list[tuple[Request, Event]]:
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
            request.kv = self.core.store.pool.bytes
            request.kv_dtype = self.core.store.pool.kv_dtype
            self._explain(request)
            events.append((request, request.error or request.output()))
        return events

    def _explain(self, request: Request) -> None:
        """Note why the prompt of a request was read, where its text is shared and its KV not its owner's."""
        first = request.sequences[0]
        group = request.groups[0]
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


SPARE = 64, 1 / 16
"""Pages beyond those asked for, at least, and as a share of them: the next question about a document may be longer."""


class EngineLender:
    """Lends engines of the same parts to the calls of an LLM, and keeps the last one for the next call."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._idle: Engine | None = None
        self._lent: set[Engine] = set()
        self._over = ""
        """Why no engine is lent any more; empty while they are."""

    def run(
        self,
        requests: Sequence[Request],
        on_prefill: OnPrefill | None,
        save: str | Path | None,
        load: str | Path | None,
        memory: FullView | None = None,
    ) -> Iterator[tuple[Request, OutputChunk | RequestOutput]]:
        """Run requests on one engine, and yield what comes of each: chunks of text, and at last its output.

        save, load: files for the KV of the first prompt, and of an earlier one (see `disk_cache.prompt_file`).
        Closing the iterator, or dropping it, cancels all requests. Raises TriforceError, and whatever `on_prefill`
        raises.
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
        sizes = sorted(pages_for(each.capacity(context, reach)) for request in requests for each in request.sequences)
        rows = min(len(sizes), MOST_ROWS)
        pages = sum(sizes[-MOST_ROWS:])
        with self._lend(rows, pages, memory, kept=not (save or load or memory)) as engine:
            pool = engine.core.store.pool
            saved = parts.open_prompt(load, pool) if load else None
            on_read = parts.prompt_saver(save, pool, requests[0].prompt) if save else None
            yield from engine.run(requests, memory, saved, on_prefill, on_read)

    def close(self, reason: str) -> None:
        """Give back all memory, and write what is queued for the disk; requests that run end with the reason."""
        self._end(reason)
        self.clear()
        if self.parts.disk:
            self.parts.disk.close()

    def abandon(self, reason: str) -> None:
        """End requests with the reason, and leave all else to the process that was forked."""
        self._end(reason)
        if self.parts.disk:
            self.parts.disk.close.detach()

    def _end(self, reason: str) -> None:
        self._over = reason
        for engine in list(self._lent):
            engine.end(reason)

    def clear(self) -> None:
        """Give back the memory of the kept engine, and forget what it has read."""
        if self._idle:
            self._idle.close()
        self._idle = None

    @contextmanager
    def _lend(self, rows: int, pages: int, memory: FullView | None, kept: bool) -> Iterator[Engine]:
        """Lend an engine. kept: the one that is kept, if it fits, which is kept again unless there was an error."""
        if self._over:
            raise RequestError(self._over)
        engine = (
            self._take(rows, pages) if kept else Engine(self.parts, rows, pages, given=memory.pool if memory else None)
        )
        self._lent.add(engine)
        try:
            yield engine
        except GeneratorExit:  # a stream that is closed between two steps
            self._give_back(engine, kept)
            raise
        except BaseException as error:
            with suppress(*(Exception,) if isinstance(error, KeyboardInterrupt) else ()):
                engine.close()
            raise
        else:
            self._give_back(engine, kept)
        finally:
            self._lent.discard(engine)

    def _give_back(self, engine: Engine, kept: bool) -> None:
        if kept and not self._over:
            self._idle = engine
        else:
            engine.close()

    def _take(self, rows: int, pages: int) -> Engine:
        """Return the kept engine, if it is idle and large enough, or a new one."""
        if self._idle and self._idle.core.store.rows >= rows and self._idle.core.store.pages >= pages:
            engine = self._idle
            self._idle = None
            return engine
        self.clear()
        # Where KV is offloaded, unused pages would take memory from pages that could stay.
        more = max(SPARE[0], int(pages * SPARE[1])) if self.parts.speculation.offload.kind == "none" else 0
        try:
            return Engine(self.parts, rows, pages + more)
        except CacheError:
            return Engine(self.parts, rows, pages)


def collected(
    requests: Sequence[Request], events: Iterable[tuple[Request, Event]], use_tqdm: bool | None
) -> list[RequestOutput]:
    """Return the output of each request, in their order. Raises Interruption, which has those that are done."""
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
    """Whether stderr is a terminal, or the output of a cell of a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
