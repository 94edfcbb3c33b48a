"""GrammarQueue: requests with a grammar. Each rank compiles the grammar in a thread; all then start the request.

A compiled grammar cannot be sent to another process, so each rank compiles it. Ranks synchronize in each step: a rank
that compiled between two steps would stop all texts.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.llm import LLM
from triforce.server.answers.answer_format import AnswerFormat
from triforce.server.engine_client import GenerationRequest
from triforce.server.errors import retryable
from triforce.structured_output.compiler import CompiledGrammar, GrammarCompiler, GrammarTrial

CompilingGrammar = Future[CompiledGrammar]


class GrammarQueue:
    """Compiles the grammars of numbered requests, one at a time on this rank.

    All ranks make the same calls of `put`, `cancel` and `take` between the same steps.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._thread = ThreadPoolExecutor(1, "triforce-grammars")
        self._waiting: dict[int, tuple[GenerationRequest, CompilingGrammar]] = {}
        # `prepare` holds the GIL, for a large vocabulary about a second, so it runs before any text is generated.
        self._thread.submit(self._prepare)

    def _prepare(self) -> None:
        tokenizer = self._llm.grammars.prepare()
        self._llm.grammars.prepare(AnswerFormat(tokenizer.template, tokenizer).marks.token_ids)

    def put(self, number: int, generation: GenerationRequest) -> None:
        """Start to compile the grammar of a request. A grammar that is already compiled is ready at once."""
        self._waiting[number] = generation, self._start_compiling(generation)

    def cancel(self, number: int) -> None:
        """Remove a request. Unknown numbers are ignored."""
        _, compiling = self._waiting.pop(number, (None, None))
        if compiling:
            compiling.cancel()

    def take(self, timeout: float) -> list[tuple[int, GenerationRequest | Exception]]:
        """Remove the first requests whose grammars every rank has finished. Returns each with its grammar or error.

        timeout: seconds that a rank waits for the first grammar.
        """
        outcomes: list[tuple[int, GenerationRequest | Exception]] = []
        while self._waiting:
            number, (generation, compiling) = next(iter(self._waiting.items()))
            wait([compiling], 0 if outcomes else timeout)
            if not self._llm.ranks.all_true(compiling.done()):
                break
            del self._waiting[number]
            error = compiling.exception()
            if self._llm.ranks.all_true(error is None):
                outcomes.append((number, replace(generation, compiled=compiling.result())))
            else:
                outcomes.append((number, error if isinstance(error, Exception) else failed_on_other_rank()))
        return outcomes

    def _start_compiling(self, generation: GenerationRequest) -> CompilingGrammar:
        grammar = generation.params.grammar
        assert grammar
        if generation.compiled:
            finished_future = CompilingGrammar()
            finished_future.set_result(generation.compiled)
            return finished_future
        if generation.tried:
            return self._thread.submit(lambda: self._llm.grammars.compile_tried(grammar))
        return self._thread.submit(lambda: self._llm.grammars.compile(grammar))


def failed_on_other_rank() -> RequestError:
    """Return the error of a request that has failed on another rank."""
    return RequestError("one of the processes that share the model cannot serve this; try again, or start with --tp 1")


T = TypeVar("T")


class SharedSlots:
    """A bounded number of slots for one kind of work, which are shared fairly among keys.

    work_name: shown in errors. cpu_share: number of slots as a share of the processors; there is at least one slot.
    max_per_key: pieces of work of one key that may run or wait at a time. One event loop at a time may use the slots.
    """

    def __init__(self, work_name: str, cpu_share: float, max_per_key: int) -> None:
        self._work_name = work_name
        self._max_per_key = max_per_key
        self._free_slots = max(1, int((os.cpu_count() or 1) * cpu_share))
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting pieces of work by key, in the order of the keys' turns."""

    async def run(self, key: str, work: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        """Run `work` in a thread once there is a slot, and return its result. Raises ApiError beyond `max_per_key`.

        A thread cannot be stopped: on cancellation `cancel` is called, and the slot stays taken until `work` returns.
        """
        async with self._slot(key):
            task = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise

    @asynccontextmanager
    async def _slot(self, key: str) -> AsyncIterator[None]:
        if self._counts[key] >= self._max_per_key:
            text = f"{self._max_per_key} {self._work_name} of this client run or wait already, the limit for one client"
            raise retryable(429, text, code="share_used_up")
        self._counts[key] += 1
        try:
            await self._acquire(key)
            try:
                yield
            finally:
                self._release()
        finally:
            self._counts -= Counter([key])  # keys without a count are dropped

    async def _acquire(self, key: str) -> None:
        if self._free_slots:
            self._free_slots -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot was granted at the same moment
                self._release()
            raise

    def _release(self) -> None:
        """Pass the slot to the next key, which then moves to the end of the order."""
        while self._waiting:
            key = next(iter(self._waiting))
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # at the end
            if not turn.done():
                turn.set_result(None)
                return
        self._free_slots += 1


CPU_SHARE = 1 / 4
"""Share of the processors that compile grammars."""


class GrammarPool:
    """Compiles grammars for one model. max_per_key: grammars of one key that compile or wait at a time."""

    def __init__(self, compiler: GrammarCompiler, max_per_key: int) -> None:
        self._compiler = compiler
        self._slots = SharedSlots("grammars", CPU_SHARE, max_per_key)

    async def compile(self, grammar: Grammar, key: str) -> CompiledGrammar:
        """Return the compiled grammar, cached if possible. Raises RequestError, or ApiError beyond `max_per_key`."""
        if compiled := self._compiler.cached(grammar):
            return compiled
        trial = GrammarTrial(grammar)
        return await self._slots.run(key, partial(self._compiler.compile, grammar, trial), trial.cancel)
