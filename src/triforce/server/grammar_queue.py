"""GrammarQueue: requests with a grammar, which all ranks compile beside their steps before any of them starts it.

A compiled grammar cannot be sent to another process. And ranks wait for each other in each step: one that compiled
between two steps would stop the texts of all.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from triforce.errors import RequestError
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest
from triforce.structured_output.compiler import CompiledGrammar

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
