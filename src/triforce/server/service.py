"""Service of every endpoint, from a parsed request to its answer: queue, await or stream, cancel, time, log.

The work of a client that hangs up is cancelled at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from triforce.engine.output_stream import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server import logs
from triforce.server.disconnects import EventStream, unless_disconnected
from triforce.server.engine_client import EngineClient, Event, GenerationRequest, GenerationStream, PrefillProgress
from triforce.server.errors import broken, refusal_for, took_too_long
from triforce.server.limits import Limits
from triforce.server.metrics import Metrics
from triforce.server.request_parser import RequestParser
from triforce.server.sampling_fields import SamplingFields
from triforce.server.usage import without_text

B = TypeVar("B")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The last event of completions and of chats."""
AT_ONCE = 4096
"""Tokens, and alternatives to them, that are written into an answer while others wait; more are written apart."""


def frame(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """Return one server-sent event."""
    name = f"event: {event}\n" if event else ""
    # ASCII: some clients split lines at every separator that Unicode has.
    return f"{name}data: {json.dumps(data, allow_nan=False)}\n\n".encode()


def key_of(request: Request) -> str:
    """Return the owner of a request: the digest of its key, if one was needed (see `security`)."""
    key: str = getattr(request.state, "scope", "")
    return key


class ResponseWriter(Protocol):
    """Writes the answers of one endpoint."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer; one output for each prompt."""

    def opening(self) -> Iterable[bytes]:
        """Yield frames that come before any text."""

    def reading(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        """Yield frames that tell how far a prompt is read, counted from 0."""

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        """Yield frames for a chunk of text that continues a prompt, counted from 0."""

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        """Yield frames that come after all text."""


@dataclass(frozen=True, slots=True)
class Service:
    """Shared state of the endpoints. `name` is the served model's; `fingerprint` tells what changes texts."""

    name: str
    fingerprint: str
    parser: RequestParser
    engine: EngineClient
    metrics: Metrics
    limits: Limits

    async def parsed(self, request: Request, parse: Callable[[B, str], Coroutine[Any, Any, T]], body: B) -> T:
        """Return what `parse` makes of a body and its key. Raises ClientDisconnected, or what it raises."""
        return await unless_disconnected(request.receive, parse(body, key_of(request)))

    async def answer(
        self, request: Request, generations: list[GenerationRequest], writer: ResponseWriter, body: SamplingFields
    ) -> Response:
        """Generate, and send as `body` wants. Raises ClientDisconnected, or what `errors.refusal_for` knows."""
        key = key_of(request)
        scope = body.scope(key)
        answers = self.engine.submit([replace(generation, scope=scope) for generation in generations])
        report: dict[str, Any] = request.state.report
        report |= {"prompts": len(generations), "prompt_tokens": sum(len(each.prompt) for each in generations)}

        events = self._events(answers, body.scored_only)

        def end() -> None:
            for answer in answers:
                answer.cancel()

        if body.stream:
            return EventStream(self._frames(events, writer, report), end, body.headers)
        try:
            outputs = await unless_disconnected(request.receive, _collect(events))
        finally:
            end()
        report |= _summary(outputs)
        write = partial(self._written, writer, outputs, body)
        if sum(map(_entries, generations, outputs)) <= AT_ONCE:
            return write()
        return await unless_disconnected(request.receive, self.parser.large.run(key, write))

    def _written(self, writer: ResponseWriter, outputs: Sequence[RequestOutput], body: SamplingFields) -> Response:
        return JSONResponse(writer.whole(outputs), headers=body.headers)

    async def _frames(
        self, events: AsyncGenerator[tuple[int, Event], None], writer: ResponseWriter, report: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the whole stream. After the headers an error can only be its last frame."""
        outputs = []
        try:
            for data in writer.opening():
                yield data
            async with aclosing(events):
                async for prompt, event in events:
                    if isinstance(event, RequestOutput):
                        outputs.append(event)
                    elif isinstance(event, PrefillProgress):
                        for data in writer.reading(prompt, event):
                            yield data
                    else:
                        for data in writer.piece(prompt, event):
                            yield data
            report |= _summary(outputs)
            for data in writer.closing(outputs):
                yield data
        except Exception as error:
            refusal = refusal_for(error)
            if refusal is None:
                logs.failure("stream broke", error)
            report["refused"] = (refusal or broken()).status
            yield frame((refusal or broken()).body())

    async def _events(
        self, answers: Sequence[GenerationStream], scored_only: bool
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of all answers, prompt by prompt. Raises ApiError when they take too long."""
        deadline, started = asyncio.get_running_loop().time() + self.limits.seconds, perf_counter()
        for prompt, answer in enumerate(answers):
            async with aclosing(self.metrics.watch(answer, started)) as events:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            event = await anext(events)
                    except StopAsyncIteration:
                        break
                    except TimeoutError:
                        raise took_too_long(self.limits.seconds) from None
                    yield prompt, without_text(event) if scored_only else event


async def _collect(events: AsyncGenerator[tuple[int, Event], None]) -> list[RequestOutput]:
    async with aclosing(events):
        return [event async for _, event in events if isinstance(event, RequestOutput)]


def _entries(generation: GenerationRequest, output: RequestOutput) -> int:
    """Return how many tokens an answer tells of, alternatives among them."""
    params = generation.params
    read = 0 if params.prompt_logprobs is None else params.n * output.prompt_tokens
    return (read + output.completion_tokens) * (1 + (params.logprobs or 0))


def _summary(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the fields of the access log."""
    cached, reread = sum(o.cached_tokens for o in outputs), [o.reread for o in outputs if o.reread]
    told = {"cached_tokens": cached, "reread": reread} if reread else {"cached_tokens": cached}
    return {"new_tokens": sum(o.completion_tokens for o in outputs), "mode": outputs[0].mode} | told
