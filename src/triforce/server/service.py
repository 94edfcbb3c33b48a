"""Service of the endpoints: parse a request, queue it, await or stream its answer, cancel, measure and log it.

The work of a client that disconnects is cancelled at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.engine import OutputChunk
from triforce.engine.inputs import Prompt, known, one_of, one_or_many
from triforce.engine.tier_builder import DRAFT_MODES
from triforce.errors import ContextLengthError, RequestError, argument
from triforce.interface.grammar import Grammar
from triforce.interface.messages import ends_in_answer
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams, chat_defaults, random_seed
from triforce.sampling.logits import check_bias
from triforce.server import logs
from triforce.server.answer_fields import frame, without_text
from triforce.server.engine_client import (
    EngineClient,
    Event,
    GenerationRequest,
    GenerationStream,
    PrefillProgress,
    ServedModel,
)
from triforce.server.errors import (
    ClientDisconnected,
    field_error,
    internal_error,
    naming_field,
    refusal_for,
    timeout_error,
)
from triforce.server.grammar_queue import GrammarPool, SharedSlots
from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS, LARGE_INPUT, MAX_ECHOED, Limits
from triforce.server.metrics import Metrics
from triforce.server.schemas import (
    ChatBody,
    CompletionBody,
    CompletionFields,
    FlatResponseFormat,
    Message,
    ResponseFormat,
    ResponsesBody,
    SamplingFields,
    ThinkingField,
    grammar_of,
    message_dict,
    message_length,
    messages_of,
)
from triforce.server.thoughts import THOUGHTS_CLOSE, THOUGHTS_OPEN, ThoughtSplitter
from triforce.server.tools import ToolChoice
from triforce.structured_output.compiler import CompiledGrammar, GrammarError

NO_LIMIT = -1
"""Value of the token limit for unlimited answers in other servers."""
PROMPT_END = 16
"""Last tokens of a prompt, which hold the mark with which thoughts may begin."""
IDLE_SECONDS = 5.0
"""Seconds without a frame of a stream after which an idle frame is sent."""
STREAM_FIELDS = ("stream_options", "trace", "return_progress")


def check_fields(body: CompletionFields, logprobs: int | None, limits: Limits) -> None:
    """Raise ApiError for values beyond the limits, and for fields without the field that they require."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if body.n is not None and not 1 <= body.n <= limits.n:
        raise field_error("n", f"n must be from 1 to {limits.n}")
    if logprobs is not None and not 0 <= logprobs <= limits.logprobs:
        name = body.sent_as.get("logprobs", "logprobs")
        raise field_error(name, f"{name} must be from 0 to {limits.logprobs}")
    if any(len(stop) > limits.stop_characters for stop in stops):
        raise field_error("stop", f"a stop string may have {limits.stop_characters} characters; shorten it")
    for name in STREAM_FIELDS:
        if getattr(body, name) and not body.stream:
            raise field_error(name, f"{name} needs stream: true")


def checked_params(body: SamplingFields, values: Mapping[str, Any], grammar: Grammar | None) -> SamplingParams:
    """Return the parameters of a request. Raises ApiError that names a field of the body."""
    with naming_field("grammar", body.sent_as):
        return SamplingParams(**values, grammar=grammar)


def check_limit(body: SamplingFields, limit: int | None, context: int) -> None:
    """Raise ApiError for a token limit that is too small, or `NO_LIMIT`."""
    if limit is None or limit >= body.min_token_limit:
        return
    field = body.sent_as.get("max_tokens", "max_tokens")
    text = f"{field} must be an integer, at least {body.min_token_limit}"
    if limit != NO_LIMIT:
        raise field_error(field, text)
    raise field_error(
        field,
        f"{text}, and {NO_LIMIT} does not stand for an unlimited text here; send {context}, the size of the context",
    )


def fit_to_kv(
    params: SamplingParams, body: SamplingFields, prompt_tokens: int, context: int, limits: Limits
) -> SamplingParams:
    """Return the parameters for a prompt of `prompt_tokens`. Without a requested limit, KV bounds max_tokens.

    Raises ApiError or ContextLengthError where prompt and answer exceed the KV capacity.
    """
    rows = min(params.n, limits.rows)
    answer_tokens = min(params.max_tokens, context - prompt_tokens)
    kv_tokens = limits.kv_capacity(context)
    if rows * (prompt_tokens + answer_tokens) <= kv_tokens:
        return params
    capacity_text = f"the {kv_tokens} tokens that this server has room for (--max-kv-tokens)"
    if prompt_tokens >= kv_tokens:
        text = f"the prompt of {prompt_tokens} tokens and an answer need more than {capacity_text}; shorten it"
        raise ContextLengthError(text)
    field = body.sent_as.get("max_tokens", "max_tokens")
    remaining_tokens = kv_tokens // rows - prompt_tokens
    if getattr(body, field) is None and remaining_tokens > 0:
        return replace(params, max_tokens=remaining_tokens)
    if rows > 1:
        text = f"{rows} texts of {prompt_tokens} + {answer_tokens} tokens need more than {capacity_text}; lower n"
        raise field_error("n", f"{text} or {field}" if remaining_tokens > 0 else text)
    text = f"{prompt_tokens} + {answer_tokens} tokens need more than {capacity_text}"
    raise field_error(field, f"{text}; lower {field} to {remaining_tokens}, or leave it out")


def check_echo(tokens: int, characters: int, params: SamplingParams, limits: Limits) -> None:
    """Raise ApiError where an echo of the prompts exceeds the limits of an answer."""
    logprob_count = tokens * params.n * (1 + params.prompt_logprobs) if params.prompt_logprobs is not None else 0
    if logprob_count > MAX_ECHOED:
        raise field_error(
            "logprobs",
            f"an echo of {tokens} tokens with {params.prompt_logprobs} alternatives each has {logprob_count} "
            f"log-probabilities; the maximum is {MAX_ECHOED}. Send less, or lower logprobs",
        )
    if (max_characters := limits.body_bytes) < characters * params.n:
        raise field_error(
            "echo", f"{params.n} echoes of {characters} characters are more than {max_characters}; lower n"
        )


def mode_of(name: str, modes: Sequence[str]) -> str:
    """Return `name` if it is a mode that the models can run. Raises RequestError."""
    if name in DRAFT_MODES and name not in modes:
        raise RequestError(f"{argument('mode')} {name!r} needs a draft model, and this server has none; "
                           f"choose from {', '.join(modes)}")  # fmt: skip
    return known(argument("mode"), name, modes)


def biases(token_biases: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """Return biases with integer keys, as JSON keys are strings. Raises ApiError."""
    if token_biases is None:
        return None
    invalid_key = next((key for key in token_biases if not (key.isascii() and key.isdecimal() and len(key) < 19)), None)
    if invalid_key is not None:
        raise field_error(
            "logit_bias", f"logit_bias names {invalid_key[:30]!r}, which is no token id; keys are integers"
        )
    return {int(key): value for key, value in token_biases.items()}


LARGE_CPU_SHARE = 1 / 2
"""Share of the processors for large bodies, texts and answers."""
_COPIED_FIELDS = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("n", "stop", "presence_penalty", "frequency_penalty", "trace"),
)


class RequestParser:
    """Parses requests for one model. key: of the sender; slots for large requests are shared fairly among keys."""

    def __init__(self, llm: ServedModel, tokenizer: Tokenizer, limits: Limits) -> None:
        self.llm = llm
        self.tokenizer = tokenizer
        self.limits = limits
        self.large_slots = SharedSlots("large requests", LARGE_CPU_SHARE, limits.waiting + limits.rows)
        self._grammars = GrammarPool(llm.grammars, limits.grammars)

    @property
    def context(self) -> int:
        """Maximal number of tokens of prompt and answer together."""
        return self.llm.target.config.context

    async def completion(self, body: CompletionBody, key: str) -> list[GenerationRequest]:
        """Return one request for each prompt. Raises ApiError."""
        prompts = one_or_many(body.prompt)
        if not prompts:
            raise field_error("prompt", "the prompt is empty; give at least one token of text")
        max_prompts = min(self.limits.prompts, self.limits.waiting + self.limits.rows)  # prompts in rows do not wait
        if len(prompts) > max_prompts:
            raise field_error("prompt", f"{len(prompts)} prompts; send at most {max_prompts} in one request")
        if body.echo and body.stream and body.logprobs is not None:
            raise field_error("stream", "an echo with logprobs cannot be streamed; leave out stream, echo or logprobs")
        params = self._params(
            body,
            await _grammar(body, body.response_format),
            # max_tokens 0 scores the prompt. The engine draws at least one token; `without_text` removes it.
            max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens or 1,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        ids = list[list[int]]()
        for place, prompt in enumerate(prompts):
            with naming_field("prompt"), one_of("prompt", place, len(prompts)):
                ids.append(await self._ids(prompt, key, body.parse_special is not False))
        if body.echo:
            check_echo(sum(map(len, ids)), sum(map(len, prompts)), params, self.limits)
        return await self._requests(ids, params, body, key)

    async def chat(self, body: ChatBody, key: str) -> list[GenerationRequest]:
        """Return the request for a conversation. Raises ApiError."""
        if body.top_logprobs and not body.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs: true")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        tools = self.tools(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = await _grammar(body, body.response_format, tools)
        params = self._params(body, grammar, max_tokens=max_tokens, logprobs=logprobs)
        params = replace(params, stop=(*params.stop, *self._stops(tools)))
        ids = await self.conversation(body.messages, key, body, tools)
        return await self._requests([ids], params, body, key)

    async def response(self, body: ResponsesBody, key: str) -> list[GenerationRequest]:
        """Return the request for instructions and input. Raises ApiError."""
        tools = self.tools(body)
        grammar = await _grammar(body, body.text.format if body.text else None, tools)
        params = self._params(body, grammar, max_tokens=body.max_output_tokens)
        params = replace(params, stop=(*params.stop, *self._stops(tools)))
        messages = messages_of(body.instructions, body.input)
        ids = await self.conversation(messages, key, body, tools, "input")
        return await self._requests([ids], params, body, key)

    def tools(self, body: ChatBody | ResponsesBody) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError."""
        return body.choose_tools(self.tokenizer.template)

    def _stops(self, tools: ToolChoice | None) -> tuple[str, ...]:
        """Return the texts that end an answer of one call. In thoughts they would end it too early."""
        return tools.stops if tools and THOUGHTS_CLOSE not in self.tokenizer.template else ()

    async def ids(self, prompt: Prompt, key: str, field: str = "prompt") -> list[int]:
        """Return the token ids of a text, or check token ids. field: of the request. Raises ApiError."""
        with naming_field(field):
            return await self._ids(prompt, key)

    async def _ids(self, prompt: Prompt, key: str, parse_special: bool = True) -> list[int]:
        """Return checked token ids. Raises RequestError for the prompt, or ApiError without a free slot.

        parse_special: as in `Tokenizer.encode`.
        """
        self._check_length(len(prompt) if isinstance(prompt, str) else 0)

        def encode() -> list[int]:
            if isinstance(prompt, str) and not parse_special:
                return self.llm.encode(self.tokenizer.encode(prompt, parse_special=False))
            return self.llm.encode(prompt)

        return await self.in_thread(len(prompt), key, encode)

    async def tokens(self, text: str, special: bool, key: str) -> list[int]:
        """Return the token ids of a text, perhaps empty. special: whether to add special tokens. Raises ApiError."""
        with naming_field("prompt"):
            self._check_length(len(text))
            return await self.in_thread(len(text), key, partial(self.tokenizer.encode, text, special))

    async def conversation(
        self,
        messages: Sequence[Message],
        key: str,
        body: ThinkingField,
        tools: ToolChoice | None = None,
        field: str = "messages",
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template. Raises ApiError.

        body: it has variables of the template. field: name of the field of the conversation.
        """
        if not self.tokenizer.chats:
            raise field_error(field, "this model has no chat template; send a text to /v1/completions instead")
        length = sum(map(message_length, messages))
        with naming_field(field):
            self._check_length(length)
        template = self.tokenizer.template
        variables = body.template_variables(template)
        if any(getattr(message, "reasoning_content", None) for message in messages) and (
            "reasoning_content" not in template
        ):
            body.ignore(f"{field}.reasoning_content")
        template_messages = [message_dict(message, template) for message in messages]
        continue_final = body.continue_final_message is not False
        if body.add_generation_prompt is False and not (continue_final and ends_in_answer(template_messages)):
            text = "the prompt ends where the answer begins, unless the answer continues a turn of the assistant"
            raise field_error("add_generation_prompt", f"{text}; leave it out")

        def encode() -> list[int]:
            shown_tools = tools.shown if tools else None
            return self.llm.encode(self.tokenizer.chat(template_messages, shown_tools, variables, continue_final))

        with naming_field(field, {"messages": field}):
            return await self.in_thread(length, key, encode)

    def thoughts(self, body: ThinkingField, generation: GenerationRequest) -> ThoughtSplitter:
        """Return what separates thoughts from an answer. A grammar leaves no room for thoughts."""
        has_thoughts = (
            THOUGHTS_CLOSE in self.tokenizer.template
            and body.reasoning_format != "none"
            and generation.params.grammar is None
        )
        prompt_end = "".join(map(self.tokenizer.text_of, generation.prompt[-PROMPT_END:]))
        return ThoughtSplitter(has_thoughts=has_thoughts, open_at_start=prompt_end.rstrip().endswith(THOUGHTS_OPEN))

    async def in_thread(self, size: int, key: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. size: in bytes or characters; large work waits for a slot."""
        return await (asyncio.to_thread(work) if size <= LARGE_INPUT else self.large_slots.run(key, work))

    def _check_length(self, characters: int) -> None:
        """Raise ContextLengthError for a text that exceeds the context in any tokenization."""
        max_characters = self.context * self.limits.characters_per_token
        if characters > max_characters:
            text = f"the prompt has {characters} characters; a context of {self.context} tokens holds {max_characters}"
            raise ContextLengthError(f"{text} at most. Shorten it")

    async def _requests(
        self, prompts: Sequence[list[int]], params: SamplingParams, body: SamplingFields, key: str
    ) -> list[GenerationRequest]:
        """Return a request for each prompt, after all are checked. Raises ApiError."""
        requests = list[GenerationRequest]()
        for place, ids in enumerate(prompts):
            with naming_field(body.prompt_field), one_of(body.prompt_field, place, len(prompts)):
                requests.append(self._request(ids, params, body))
        if params.grammar is None:
            return requests
        with naming_field(body.output_format or "tools"):
            compiled = await self._compiled(params.grammar, body, key)
        return [replace(request, compiled=compiled) for request in requests]

    async def _compiled(self, grammar: Grammar, body: SamplingFields, key: str) -> CompiledGrammar:
        """Return the compiled grammar of a request. Raises RequestError, or ApiError that names the faulty tool."""
        try:
            return await self._grammars.compile(grammar, key)
        except GrammarError as error:
            if isinstance(body, ChatBody | ResponsesBody) and (tools := self.tools(body)):
                raise tools.refusal(error) from error
            raise

    def _request(self, ids: list[int], params: SamplingParams, body: SamplingFields) -> GenerationRequest:
        with naming_field("logit_bias"):
            check_bias([params], self.llm.target.config.vocab_size)
        params = fit_to_kv(params, body, len(ids), self.context, self.limits)
        with naming_field("mode"):
            mode = None if body.mode is None else mode_of(body.mode, self.llm.modes)
        progress = isinstance(body, CompletionFields) and bool(body.return_progress)
        seeded_params = params if params.seed is not None else replace(params, seed=random_seed())  # reported
        return GenerationRequest(ids, seeded_params, mode, progress=progress)

    def _params(
        self, body: SamplingFields, grammar: Grammar | None, *, max_tokens: int | None, **logprob_params: int | None
    ) -> SamplingParams:
        values: dict[str, Any] = {
            name: value for name in _COPIED_FIELDS if (value := getattr(body, name, None)) is not None
        }
        check_limit(body, max_tokens, self.context)
        values |= {"max_tokens": ANSWER_TOKENS if max_tokens is None else max_tokens} | logprob_params
        if isinstance(body, CompletionFields):
            check_fields(body, logprob_params.get("logprobs"), self.limits)
            values["logit_bias"] = biases(body.logit_bias)
        model_defaults = self.llm.sampling_defaults
        defaults = model_defaults if isinstance(body, CompletionBody) else chat_defaults(model_defaults)
        return checked_params(body, defaults | values, grammar)


async def _grammar(
    body: SamplingFields, form: ResponseFormat | FlatResponseFormat | None, tools: ToolChoice | None = None
) -> Grammar | None:
    """Return the grammar of the answer, or None. Raises ApiError."""

    def read() -> Grammar | None:
        answer = grammar_of(form)
        return tools.grammar(answer) if tools else answer

    with naming_field(body.output_format or "tools"):
        return await asyncio.to_thread(read) if tools or form else None


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

    While no frame comes, as while a prompt is read, it sends `idle_frame()` every `IDLE_SECONDS`: clients and proxies
    give up a silent connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        idle_frame: Callable[[], bytes],
        end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        """Store the frames. end: always called at the end, as closing a generator that never started runs no code."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames = frames
        self._idle_frame = idle_frame
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
        async with aclosing(self._frames) as frames:
            next_frame = asyncio.ensure_future(anext(frames))
            try:
                while True:
                    ready, _ = await asyncio.wait({next_frame}, timeout=IDLE_SECONDS)
                    if not ready:
                        yield self._idle_frame()
                        continue
                    try:
                        data = next_frame.result()
                    except StopAsyncIteration:
                        return
                    yield data
                    next_frame = asyncio.ensure_future(anext(frames))
            finally:
                next_frame.cancel()
                await asyncio.wait({next_frame})  # only then may its generator be closed


B = TypeVar("B")
T = TypeVar("T")

INLINE_ENTRIES = 4096
"""Maximal number of tokens, with alternatives, of an answer that is serialized in the event loop, not in a thread."""


def key_of(request: Request) -> str:
    """Return the owner of a request: the digest of its key (see `security`), or an empty string without keys."""
    key: str = getattr(request.state, "scope", "")
    return key


class ResponseWriter(Protocol):
    """Writes the answers of one endpoint."""

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

        events = self._events(answers, body.scored_only)

        def end() -> None:
            for answer in answers:
                answer.cancel()

        if body.stream:
            return EventStream(self._frames(events, writer, report), writer.idle_frame, end, body.headers)
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
        return JSONResponse(writer.full_answer(outputs), headers=body.headers)

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
            yield frame((refusal or internal_error()).body())

    async def _events(
        self, answers: Sequence[GenerationStream], scored_only: bool
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of all answers, prompt by prompt. Raises ApiError after the time limit."""
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        started = perf_counter()
        for prompt, answer in enumerate(answers):
            async with aclosing(self.metrics.watch(answer, started)) as events:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            event = await anext(events)
                    except StopAsyncIteration:
                        break
                    except TimeoutError:
                        raise timeout_error(self.limits.seconds) from None
                    yield prompt, without_text(event) if scored_only else event


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
