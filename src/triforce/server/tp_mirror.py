"""The engine behind a server on each rank: rank 0 decides which requests come and go, all do it alike.

Commands are carried out between two steps, which all ranks make together. So their requests are in the same state, and
the commands hold what only rank 0 knows: new requests, and clients that have disconnected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from triforce.engine.engine import Event, Request
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.grammar_queue import GrammarQueue, failed_elsewhere
from triforce.server.limits import Limits

IDLE_SECONDS = 0.05
"""Seconds that ranks without a text wait for a grammar before they hear of other requests."""


@dataclass(frozen=True, slots=True)
class StepCommands:
    """Commands of rank 0 before a step. Requests are identified by numbers."""

    cancelled: list[int]
    """Requests that nobody waits for any more."""
    new: list[tuple[int, GenerationRequest]]


class TPMirror:
    """Applies commands to this rank's engine. Uses `rows`, `kv_tokens` and `max_itl` of the limits."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self.llm = llm
        self.texts = llm.open(limits.rows, limits.room(llm.target.config.context), max_itl=limits.max_itl)
        self._grammars = GrammarQueue(llm)
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._progress: dict[int, PrefillProgress] = {}  # that nobody was told of yet
        self._places: dict[int, int] = {}
        """Places in the queue that were told last, of requests that want their progress."""

    def apply(self, commands: StepCommands) -> list[tuple[int, Event | PrefillProgress | Request | None]]:
        """Carry out commands and make a step. Return by number: None for cancelled requests, requests, events.

        What this raises is no one request's fault.
        """
        outcomes: list[tuple[int, Event | PrefillProgress | Request | None]] = []
        for number in commands.cancelled:
            self._forget(number)
            outcomes.append((number, None))
        for number, generation in commands.new:
            if generation.params.grammar:
                self._grammars.put(number, generation)
            else:
                outcomes.append((number, self._start(number, generation)))
        for number, compiled in self._grammars.take(0 if self._requests else IDLE_SECONDS):
            outcomes.append((number, compiled if isinstance(compiled, Exception) else self._start(number, compiled)))
        events = self.texts.step()
        self._note_places()
        outcomes += self._progress.items()
        self._progress.clear()
        for request, event in events:
            number = self._numbers[request]
            if isinstance(event, Exception | RequestOutput):
                self._forget(number)
            outcomes.append((number, event))
        return outcomes

    def write_behind(self, stop: Callable[[], object]) -> None:
        """Hand what the disk cache is to keep to its thread, until `stop` says so."""
        self.texts.core.write_behind(stop)

    def close(self) -> None:
        """Cancel all requests."""
        self.texts.close()
        self._requests.clear()
        self._numbers.clear()
        self._progress.clear()
        self._places.clear()

    def _start(self, number: int, generation: GenerationRequest) -> Request | Exception:
        """Queue a request, or return the error. A request that fails on one rank is started on none."""
        request, error = None, None
        try:
            request = self.llm.request(
                generation.prompt, generation.params, generation.mode, generation.scope, generation.compiled
            )
        except Exception as reason:
            error = reason
        if not self.llm.ranks.all_true(error is None):
            return error or failed_elsewhere()
        assert request
        try:
            self.texts.submit([request], on_prefill=partial(self._read, number) if generation.progress else None)
        except Exception as reason:
            return reason
        if generation.progress:
            self._places[number] = 0
        self._requests[number], self._numbers[request] = request, number
        return request

    def _read(self, number: int, tokens: int, _: int) -> None:
        """Note the progress of a prompt. Its last token is fed with the first proposal; choices copy what is read."""
        request = self._requests[number]
        total, began = len(request.prompt), request.started or perf_counter()
        processed = min(tokens + 1, total)
        progress = PrefillProgress(total, request.groups[0].cached, processed, int(1000 * (perf_counter() - began)))
        self._progress[number] = progress

    def _note_places(self) -> None:
        """Note the places of requests that wait and want to know, where these are others than before."""
        if not self._places:
            return
        places = {group: place for place, group in enumerate(self.texts.core.scheduler.waiting, 1)}
        for number, told in self._places.items():
            request = self._requests[number]
            place = places.get(request.groups[0], 0)
            if request.started is None and place != told:
                self._places[number] = place
                self._progress[number] = PrefillProgress(len(request.prompt), 0, 0, 0, place)

    def _forget(self, number: int) -> None:
        self._grammars.cancel(number)
        self._places.pop(number, None)
        request = self._requests.pop(number, None)
        if request:
            del self._numbers[request]
            self.texts.cancel(request)


def follow(llm: LLM, limits: Limits) -> None:
    """Run a rank other than the first until rank 0 is done. Raises RankError."""
    mirror = TPMirror(llm, limits)
    ignored: StepCommands | None = None
    while commands := llm.ranks.broadcast(ignored):
        mirror.apply(commands)
