"""Service of the endpoints: queue a parsed request, await or stream its answer, cancel, measure and log it.

The work of a client that disconnects is cancelled at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server import logs
from triforce.server.answer_fields import EncodableResponse, without_text
from triforce.server.engine_client import (
    EngineClient,
    Event,
    GenerationRequest,
    GenerationStream,
    PrefillProgress,
)
from triforce.server.errors import (
    ApiError,
    ClientDisconnected,
    internal_error,
    refusal_for,
    timeout_error,
)
from triforce.server.limits import Limits
from triforce.server.metrics import Metrics
from triforce.server.request_parser import RequestParser
from triforce.server.schemas import (
    SamplingFields,
)

B = TypeVar("B")
T = TypeVar("T")

IDLE_SECONDS = 5.0
"""Seconds without a frame of a stream after which an idle frame is sent."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client hangs up first, cancel it and raise ClientDisconnected."""
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnected
        return work_task.result()
    finally:
        disconnect_task.cancel()
        work_task.cancel()
        await asyncio.wait((work_task,))  # its resources are free before this returns


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams frames as they arrive, and closes the generator at the end, at an error and at a disconnect.

    While no frame comes, as while a prompt is read, it sends the writer's idle frame every `IDLE_SECONDS`: clients and
    proxies give up a silent connection.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        writer: ResponseWriter,
        end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        """Store the frames. end: always called at the end, as closing a generator that never started runs no code."""
        fixed_headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**fixed_headers, **headers}, media_type=writer.media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._idle_frame = writer.idle_frame
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            self._end()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._with_idle_frames()) as frames:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_idle_frames(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(with_silences(self._frames, IDLE_SECONDS)) as frames:
            async for data in frames:
                yield self._idle_frame() if data is None else data


async def with_silences(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield the items of a generator, and None whenever the next item has not come within `seconds`."""
    async with aclosing(items):
        next_item = asyncio.ensure_future(anext(items))
        try:
            while True:
                ready, _ = await asyncio.wait({next_item}, timeout=seconds)
                if not ready:
                    yield None
                    continue
                try:
                    item = next_item.result()
                except StopAsyncIteration:
                    return
                yield item
                next_item = asyncio.ensure_future(anext(items))
        finally:
            next_item.cancel()
            await asyncio.wait({next_item})  # only then may its generator be closed


INLINE_ENTRIES = 4096
"""Maximal number of tokens, with alternatives, of an answer that is serialized in the event loop, not in a thread."""


def key_of(request: Request) -> str:
    """Return the owner of a request: the digest of its key (see `security`), or an empty string without keys."""
    key: str = getattr(request.state, "scope", "")
    return key


class ResponseWriter(Protocol):
    """Writes the answers of one endpoint. media_type: of its streams."""

    media_type: str

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer. outputs: one for each prompt."""

    def opening(self) -> Iterable[bytes]:
        """Yield the frames before any text."""

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        """Yield frames with the progress of a prompt's prefill. prompt: its index, from 0."""

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        """Yield frames for a chunk of text that continues a prompt. prompt: its index, from 0."""

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        """Yield the frames after all text."""

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        """Yield the last frames of a stream that cannot go on."""

    def idle_frame(self) -> bytes:
        """Return a frame that says that the answer is not ready yet."""


@dataclass(frozen=True, slots=True)
class Service:
    """Shared state of the endpoints. name: of the served model. fingerprint: digest of all that changes texts."""

    name: str
    fingerprint: str
    parser: RequestParser
    engine: EngineClient
    metrics: Metrics
    limits: Limits

    async def run_parser(self, request: Request, parse: Callable[[B, str], Coroutine[Any, Any, T]], body: B) -> T:
        """Return the result of `parse` for a body and the request's key. Raises its errors, or ClientDisconnected."""
        return await unless_disconnected(request.receive, parse(body, key_of(request)))

    async def answer(
        self, request: Request, generations: list[GenerationRequest], writer: ResponseWriter, body: SamplingFields
    ) -> Response:
        """Generate, and return the answer or its stream, as `body` requests. Raises ClientDisconnected, or an error
        that `errors.refusal_for` converts."""
        key = key_of(request)
        scope = body.scope(key)
        answers = self.engine.submit([replace(generation, scope=scope) for generation in generations])
        report: dict[str, Any] = request.state.report
        if body.ignored:
            report["ignored"] = body.ignored
        report |= {
            "prompts": len(generations),
            "prompt_tokens": sum(len(generation.prompt) for generation in generations),
        }

        events = self._events(answers, body)

        def end() -> None:
            for answer in answers:
                answer.cancel()

        if body.stream:
            return EventStream(self._frames(events, writer, report), writer, end, body.headers)
        try:
            outputs = await unless_disconnected(request.receive, _collect(events))
        finally:
            end()
        report |= _summary(outputs)
        write = partial(self._full_response, writer, outputs, body)
        if sum(map(_entries, generations, outputs)) <= INLINE_ENTRIES:
            return write()
        return await unless_disconnected(request.receive, self.parser.large_slots.run(key, write))

    def _full_response(
        self, writer: ResponseWriter, outputs: Sequence[RequestOutput], body: SamplingFields
    ) -> Response:
        return EncodableResponse(writer.full_answer(outputs), headers=body.headers)

    async def _frames(
        self, events: AsyncGenerator[tuple[int, Event], None], writer: ResponseWriter, report: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream. An error becomes the last frame, as the headers are already sent."""
        outputs = []
        try:
            for data in writer.opening():
                yield data
            async with aclosing(events):
                async for prompt, event in events:
                    if isinstance(event, RequestOutput):
                        outputs.append(event)
                    elif isinstance(event, PrefillProgress):
                        for data in writer.prefill_progress(prompt, event):
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
            report["refused"] = (refusal or internal_error()).status
            for data in writer.failure(refusal or internal_error()):
                yield data

    async def _events(
        self, answers: Sequence[GenerationStream], body: SamplingFields
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of all answers, prompt by prompt. Raises ApiError after the time limit.

        The limit holds in the queue and from the first token of a whole answer. It holds neither while a prompt is read
        nor for a stream that goes on: agents have long prompts, and retry a request that was ended.
        """
        clock = asyncio.get_running_loop().time
        seconds = self.limits.seconds
        started = perf_counter()
        for prompt, answer in enumerate(answers):
            deadline = math.inf
            async with aclosing(with_silences(self.metrics.watch(answer, started), seconds)) as events:
                async for event in events:
                    is_waiting = event is None and (answer.waited is None or deadline < math.inf)
                    if is_waiting or (clock() > deadline and not body.stream):
                        raise timeout_error(seconds)
                    if isinstance(event, OutputChunk):
                        deadline = min(deadline, clock() + seconds)
                    if event is not None:
                        yield prompt, without_text(event) if body.scored_only else event


async def _collect(events: AsyncGenerator[tuple[int, Event], None]) -> list[RequestOutput]:
    async with aclosing(events):
        return [event async for _, event in events if isinstance(event, RequestOutput)]


def _entries(generation: GenerationRequest, output: RequestOutput) -> int:
    """Return the number of tokens that an answer reports, including alternatives."""
    params = generation.params
    prompt_entries = 0 if params.prompt_logprobs is None else params.n * output.prompt_tokens
    return (prompt_entries + output.completion_tokens) * (1 + (params.logprobs or 0))


def _summary(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the fields of the access log."""
    cached_tokens = sum(o.cached_tokens for o in outputs)
    reread = [o.reread for o in outputs if o.reread]
    cache_fields = {"cached_tokens": cached_tokens, "reread": reread} if reread else {"cached_tokens": cached_tokens}
    return {"new_tokens": sum(o.completion_tokens for o in outputs), "mode": outputs[0].mode} | cache_fields
