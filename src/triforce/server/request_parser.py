"""RequestParser: turns a request's body into what the engine generates: token ids, sampling, grammar, mode.

The limits of the server are checked here; `triforce.interface.sampling_params.SamplingParams` checks values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.inputs import Prompt, known, one_of, one_or_many, require_servable
from triforce.engine.tier_builder import DRAFT_MODES
from triforce.errors import ContextLengthError, RequestError, argument
from triforce.interface.grammar import Grammar
from triforce.interface.messages import ends_in_answer
from triforce.interface.sampling_params import SamplingParams, chat_defaults, random_seed
from triforce.sampling.logits import check_bias
from triforce.server.answers.answer_format import AnswerFormat
from triforce.server.answers.answer_parts import AnswerParser
from triforce.server.engine_client import GenerationRequest, ServedModel
from triforce.server.errors import field_error, naming_field
from triforce.server.grammar_queue import GrammarPool, SharedSlots
from triforce.server.limits import COMPLETION_TOKENS, LARGE_INPUT, MAX_ECHOED, Limits
from triforce.server.schemas import (
    CompletionBody,
    CompletionFields,
    ConversationBody,
    FlatResponseFormat,
    ResponseFormat,
    SamplingFields,
    ThinkingField,
    grammar_of,
)
from triforce.server.tools import Function, ToolChoice, shown_tools
from triforce.server.turns import Message, message_dict, message_length, thoughts_field, with_leading_system
from triforce.structured_output.compiler import CompiledGrammar, GrammarError

T = TypeVar("T")

NO_LIMIT = -1
"""Value of the token limit for unlimited answers in other servers."""
PROMPT_END = 16
"""Last tokens of a prompt, which hold the mark with which thoughts may begin."""
CONTINUED_END = 8192
"""Last tokens of a prompt whose last turn is continued, which hold the beginning of that turn."""
STREAM_FIELDS = ("stream_options", "trace", "return_progress")


def check_fields(body: CompletionFields, logprobs: int | None, limits: Limits) -> None:
    """Raise ApiError for values beyond the limits, and for fields without the field that they require."""
    if body.n is not None and not 1 <= body.n <= limits.n:
        raise field_error("n", f"n must be from 1 to {limits.n}")
    if logprobs is not None and not 0 <= logprobs <= limits.logprobs:
        name = body.sent_as.get("logprobs", "logprobs")
        raise field_error(name, f"{name} must be from 0 to {limits.logprobs}")
    for name in STREAM_FIELDS:
        if getattr(body, name) and not body.stream:
            raise field_error(name, f"{name} needs stream: true")


def check_stops(body: SamplingFields, stop: str | Sequence[str] | None, limits: Limits) -> None:
    """Raise ApiError for stop strings beyond the limits."""
    stops = [stop] if isinstance(stop, str) else stop or []
    field = body.sent_as.get("stop", "stop")
    if any("\ud800" <= character <= "\udfff" for text in stops for character in text):
        raise field_error(field, "a stop string holds half of a character; leave it out")
    if any(len(text) > limits.stop_characters for text in stops):
        raise field_error(field, f"a stop string may have {limits.stop_characters} characters; shorten it")


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
    if body.token_limit is None and remaining_tokens > 0:
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


class RequestParser:
    """Parses requests for one model. key: of the sender; slots for large requests are shared fairly among keys."""

    def __init__(self, llm: ServedModel, tokenizer: Tokenizer, limits: Limits) -> None:
        self.llm = llm
        self.tokenizer = tokenizer
        self.answers = AnswerFormat(tokenizer.template, tokenizer)
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

    async def answer(self, body: ConversationBody, key: str) -> list[GenerationRequest]:
        """Return the request for the next turn of a conversation. Raises ApiError."""
        tools = self.tools(body)
        grammar = await _grammar(body, body.answer_constraint, tools)
        default_limit = self.context if body.default_limit is None else body.default_limit
        limit = body.token_limit
        params = self._params(
            body, grammar, max_tokens=default_limit if limit is None else limit, logprobs=body.logprob_count
        )
        turns = body.turns
        ids = await self.conversation(
            turns, key, body, tuple(body.functions.values()) if tools else (), body.prompt_field
        )
        opening = self.answers.calls.answer_opening if self.answers.calls else ""
        if opening and params.grammar and tools is None and not continues_answer(turns, body):
            ids = ids + self.tokenizer.encode(opening, add_special=False)
        params = self._with_ends(params, tools)
        requests = await self._requests([ids], params, body, key)
        return [replace(request, token_texts=self.answers.marks.token_texts) for request in requests]

    async def prompt(self, body: ConversationBody, tools: ToolChoice | None, key: str) -> list[int]:
        """Return the token ids of a conversation and of the tools that its answer may call. Raises ApiError."""
        functions = tuple(body.functions.values()) if tools else ()
        return await self.conversation(body.turns, key, body, functions, body.prompt_field)

    def _with_ends(self, params: SamplingParams, tools: ToolChoice | None) -> SamplingParams:
        """Return parameters with the tokens and the text that end an answer in the model's format.

        The text ends an answer of one call. Where it is no token, thoughts may hold it and end too early. Stop strings
        of the request that spell a mark end the answer at the mark's token, too.
        """
        marks = self.answers.marks
        stops = [*params.stop, *(shown for stop in params.stop if (shown := marks.shown(stop)) != stop)]
        closing = tools.closing if tools else ""
        if closing and (marks.shown(closing) != closing or not self.answers.has_thoughts):
            stops.append(marks.shown(closing))
        end_ids = () if params.ignore_eos else self.answers.end_ids
        return replace(params, stop=tuple(stops), stop_token_ids=(*params.stop_token_ids, *end_ids))

    def tools(self, body: ConversationBody) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError."""
        return body.choose_tools(self.answers.calls, self.answers.marks)

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
        tools: Sequence[Function] = (),
        field: str = "messages",
    ) -> list[int]:
        """Return the token ids of a conversation in the model's chat template. Raises ApiError.

        body: it has variables of the template. field: name of the field of the conversation.
        """
        if not self.tokenizer.chats:
            advice = "send a text to /v1/completions, or start the server with --chat-template"
            raise field_error(field, f"this model has no chat template; {advice}")
        length = sum(map(message_length, messages))
        with naming_field(field):
            self._check_length(length)
        template = self.tokenizer.template
        variables = body.template_variables(template)
        has_thoughts = any(getattr(message, "reasoning_content", None) for message in messages)
        if has_thoughts and thoughts_field(template) is None:
            body.ignore(f"{field}.reasoning_content")
        template_messages = [message_dict(message, template) for message in messages]
        continue_final = body.continue_final_message is not False
        if body.add_generation_prompt is False and not (continue_final and ends_in_answer(template_messages)):
            text = "the prompt ends where the answer begins, unless the answer continues a turn of the assistant"
            raise field_error("add_generation_prompt", f"{text}; leave it out")

        template_tools = shown_tools(tools) or None

        def encode_turns(turns: Sequence[dict[str, Any]]) -> list[int]:
            return self.llm.encode(self.tokenizer.chat(turns, template_tools, variables, continue_final))

        def encode() -> list[int]:
            try:
                return encode_turns(template_messages)
            except RequestError:
                if all(turn["role"] not in ("system", "developer") for turn in template_messages[1:]):
                    raise
                return encode_turns(with_leading_system(template_messages))

        with naming_field(field, {"messages": field}):
            return await self.in_thread(length, key, encode)

    def answer_parser(self, body: ConversationBody, generation: GenerationRequest) -> AnswerParser:
        """Return a parser for one answer to a request."""
        tail = CONTINUED_END if continues_answer(body.turns, body) else PROMPT_END
        prompt_end = "".join(map(self.tokenizer.text_of, generation.prompt[-tail:]))
        return self.answers.parser(
            self.tools(body),
            prompt_end,
            is_continued=tail == CONTINUED_END,
            has_grammar=generation.params.grammar is not None,
            thoughts_are_text=body.reasoning_format == "none",
        )

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
            if isinstance(body, ConversationBody) and (tools := self.tools(body)):
                raise tools.refusal(error, grammar) from error
            raise

    def _request(self, ids: list[int], params: SamplingParams, body: SamplingFields) -> GenerationRequest:
        with naming_field("logit_bias"):
            check_bias([params], self.llm.target.config.vocab_size)
        with naming_field("stop_token_ids"):
            require_servable(params, self.llm.target)
        params = fit_to_kv(params, body, len(ids), self.context, self.limits)
        with naming_field("mode"):
            mode = None if body.mode is None else mode_of(body.mode, self.llm.modes)
        progress = isinstance(body, CompletionFields) and bool(body.return_progress)
        seeded_params = params if params.seed is not None else replace(params, seed=random_seed())  # reported
        return GenerationRequest(ids, seeded_params, mode, progress=progress)

    def _params(
        self, body: SamplingFields, grammar: Grammar | None, *, max_tokens: int, **logprob_params: int | None
    ) -> SamplingParams:
        values = body.sampling_values
        check_limit(body, max_tokens, self.context)
        check_stops(body, values.get("stop"), self.limits)
        values |= {"max_tokens": max_tokens} | logprob_params
        if isinstance(body, CompletionFields):
            check_fields(body, logprob_params.get("logprobs"), self.limits)
            values["logit_bias"] = biases(body.logit_bias)
        model_defaults = self.llm.sampling_defaults
        defaults = model_defaults if isinstance(body, CompletionBody) else chat_defaults(model_defaults)
        return checked_params(body, defaults | values, grammar)


def continues_answer(messages: Sequence[Message], body: ThinkingField) -> bool:
    """Whether the answer continues the last turn of the assistant."""
    last_message = messages[-1]
    is_answer = last_message.role == "assistant" and not last_message.tool_calls
    return is_answer and body.continue_final_message is not False


async def _grammar(
    body: SamplingFields, form: ResponseFormat | FlatResponseFormat | None, tools: ToolChoice | None = None
) -> Grammar | None:
    """Return the grammar of the answer, or None. Raises ApiError."""

    def read() -> Grammar | None:
        answer = grammar_of(form)
        return tools.grammar(answer) if tools else answer

    with naming_field(body.output_format or "tools"):
        return await asyncio.to_thread(read) if tools or form else None
