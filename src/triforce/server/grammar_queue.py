"""GrammarQueue: requests with a grammar, which all ranks compile beside their steps before any of them starts it.

A compiled grammar cannot be sent to another process. And ranks wait for each other in each step: one that compiled
between two steps would stop the texts of all.
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
from triforce.server.engine_client import GenerationRequest
from triforce.server.errors import later
from triforce.structured_output.compiler import CompiledGrammar, GrammarCompiler, GrammarTrial

CompilingGrammar = Future[CompiledGrammar]


class GrammarQueue:
    """Grammars of requests, by the number of the request, compiled on this rank one after the other.

    All ranks put, cancel and take alike, between the same steps.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._thread = ThreadPoolExecutor(1, "triforce-grammars")
        self._waiting: dict[int, tuple[GenerationRequest, CompilingGrammar]] = {}
        # It holds the interpreter's lock, for a second where a vocabulary is large: so before there are texts to stop.
        self._thread.submit(lambda: llm.grammars.prepare())

    def put(self, number: int, generation: GenerationRequest) -> None:
        """Begin to compile the grammar of a request that has one. A grammar that comes compiled is ready."""
        self._waiting[number] = generation, self._begun(generation)

    def cancel(self, number: int) -> None:
        """Forget a request. Harmless where it is not here."""
        _, compiling = self._waiting.pop(number, (None, None))
        if compiling:
            compiling.cancel()

    def take(self, patience: float) -> list[tuple[int, GenerationRequest | Exception]]:
        """Remove the first requests whose grammars every rank has tried; return them compiled, or what is wrong.

        patience: seconds that a rank waits for the first of them.
        """
        taken: list[tuple[int, GenerationRequest | Exception]] = []
        while self._waiting:
            number, (generation, compiling) = next(iter(self._waiting.items()))
            wait([compiling], 0 if taken else patience)
            if not self._llm.ranks.all_true(compiling.done()):
                break
            del self._waiting[number]
            error = compiling.exception()
            if self._llm.ranks.all_true(error is None):
                taken.append((number, replace(generation, compiled=compiling.result())))
            else:
                taken.append((number, error if isinstance(error, Exception) else failed_elsewhere()))
        return taken

    def _begun(self, generation: GenerationRequest) -> CompilingGrammar:
        grammar = generation.params.grammar
        assert grammar
        if generation.compiled:
            ready = CompilingGrammar()
            ready.set_result(generation.compiled)
            return ready
        if generation.tried:
            return self._thread.submit(lambda: self._llm.grammars.compile_tried(grammar))
        return self._thread.submit(lambda: self._llm.grammars.compile(grammar))


def failed_elsewhere() -> RequestError:
    """Return the error of a request that another rank cannot start."""
    return RequestError("one of the processes that share the model cannot serve this; try again, or start with --tp 1")


T = TypeVar("T")


class SharedSlots:
    """Slots of one kind of work, called `what`. portion: of the processors that it may take, at least one.

    share: pieces of one key that may run or wait at a time. Used from one event loop at a time.
    """

    def __init__(self, what: str, portion: float, share: int) -> None:
        self._what = what
        self._share = share
        self._vacant = max(1, int((os.cpu_count() or 1) * portion))
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By key; the key whose turn is next comes first."""

    async def run(self, key: str, work: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        """Return what `work` returns in a thread, once it has a slot. Raises ApiError where the key has its share.

        A thread cannot be stopped: where nobody waits any more `cancel` is called, and the slot is held to the end.
        """
        async with self._slot(key):
            working = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                cancel()
                await asyncio.gather(working, return_exceptions=True)
                raise

    @asynccontextmanager
    async def _slot(self, key: str) -> AsyncIterator[None]:
        if self._counts[key] >= self._share:
            text = f"{self._share} {self._what} of yours are being worked on or wait"
            raise later(429, text, code="share_used_up")
        self._counts[key] += 1
        try:
            await self._enter(key)
            try:
                yield
            finally:
                self._leave()
        finally:
            self._counts -= Counter([key])  # keys without a count are dropped

    async def _enter(self, key: str) -> None:
        if self._vacant:
            self._vacant -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        """Hand the slot to the key whose turn is next."""
        while self._waiting:
            key = next(iter(self._waiting))
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._vacant += 1


PORTION = 1 / 4
"""Of the processors."""


class GrammarPool:
    """Compiles grammars for one model. share: grammars of one key that are compiled or wait at a time."""

    def __init__(self, compiler: GrammarCompiler, share: int) -> None:
        self._compiler = compiler
        self._slots = SharedSlots("grammars", PORTION, share)

    async def compile(self, grammar: Grammar, key: str) -> CompiledGrammar:
        """Return a grammar compiled, at once if it was before. Raises RequestError, or ApiError beyond the share."""
        if known := self._compiler.cached(grammar):
            return known
        trial = GrammarTrial(grammar)
        return await self._slots.run(key, partial(self._compiler.compile, grammar, trial), trial.cancel)
