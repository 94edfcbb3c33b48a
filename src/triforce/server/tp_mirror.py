"""The engine behind a server, on each rank that shares it: rank 0 says what comes and goes, and all do it alike.

Its orders are carried out between two steps, which are made together; so the requests of all ranks are in the same
state wherever one of them looks, and what only rank 0 knows (who asks, who has hung up) is in the orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from triforce.engine.engine import Event, Request
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest, Reading
from triforce.server.limits import Limits


@dataclass(frozen=True, slots=True)
class StepCommands:
    """What is done before a step. Requests are told apart by numbers."""

    gone: list[int]
    """Those that nobody waits for any more."""
    fresh: list[tuple[int, GenerationRequest]]


class TPMirror:
    """Of the limits it keeps `rows`, `kv_tokens` and `max_itl`."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self._llm = llm
        self.texts = llm.open(limits.rows, limits.room(llm.target.config.context), max_itl=limits.max_itl)
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._readings: dict[int, Reading] = {}  # that nobody was told of yet

    def apply(self, orders: StepCommands) -> list[tuple[int, Event | Reading | Request | None]]:
        """Carry out orders and make a step. Returns by number None for who has gone, requests, and what comes of them.

        What this raises is no one request's fault.
        """
        told: list[tuple[int, Event | Reading | Request | None]] = []
        for number in orders.gone:
            self._forget(number)
            told.append((number, None))
        for number, ask in orders.fresh:
            begun = self._begin(number, ask)
            if not isinstance(begun, Exception):
                self._requests[number], self._numbers[begun] = begun, number
            told.append((number, begun))
        events = self.texts.step()
        told += self._readings.items()
        self._readings.clear()
        for request, event in events:
            number = self._numbers[request]
            if isinstance(event, Exception | RequestOutput):
                self._forget(number)
            told.append((number, event))
        return told

    def close(self) -> None:
        """Cancel all there are."""
        self.texts.close()
        self._requests.clear()
        self._numbers.clear()
        self._readings.clear()

    def _begin(self, number: int, ask: GenerationRequest) -> Request | Exception:
        """A request in the queue, or why not. What one rank has no use for (a grammar, say) none of them begins."""
        request, error = None, None
        try:
            request = self._llm.request(ask.prompt, ask.params, ask.mode, ask.scope)
        except Exception as reason:
            error = reason
        if not self._llm.ranks.unanimous(error is None):
            return error or RequestError(
                "one of the processes that share the model cannot serve this; try again, or start with --tp 1"
            )
        assert request
        try:
            self.texts.submit([request], on_prefill=partial(self._read, number) if ask.params.trace else None)
        except Exception as reason:
            return reason
        return request

    def _read(self, number: int, tokens: int, of: int) -> None:
        self._readings[number] = Reading(tokens, of)

    def _forget(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request:
            del self._numbers[request]
            self.texts.cancel(request)


def follow(llm: LLM, limits: Limits) -> None:
    """What every rank does that is not the first, until that one says that it was all. Raises RankError."""
    crew = TPMirror(llm, limits)
    unheard: StepCommands | None = None
    while orders := llm.ranks.agree(unheard):
        crew.apply(orders)
