"""Requests as the engine takes them: token ids and checked parameters, within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.inputs import Prompt, one_or_many
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams, chat_defaults, drawn_seed
from triforce.sampling.logits import check_bias
from triforce.server.engine_client import GenerationRequest, ServedModel
from triforce.server.errors import TOO_LONG, about, wrong
from triforce.server.grammar_pool import GrammarPool
from triforce.server.limits import ANSWER_TOKENS, APART, COMPLETION_TOKENS, Limits
from triforce.server.message_bodies import Message, characters, plain, turns
from triforce.server.request_checks import (
    biases,
    check_echo,
    check_fields,
    check_limit,
    checked_params,
    held_to_room,
    mode_of,
)
from triforce.server.response_formats import FlatResponseFormat, ResponseFormat, grammar_of
from triforce.server.sampling_fields import SamplingFields
from triforce.server.schemas import ChatBody, CompletionBody, CompletionFields, ResponsesBody
from triforce.server.shared_slots import SharedSlots
from triforce.server.tools import ToolChoice

T = TypeVar("T")
LARGE_PORTION = 1 / 2
"""Of the processors, for bodies, texts and answers that are large."""
_PASSED_ON = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("n", "stop", "presence_penalty", "frequency_penalty", "trace"),
)


class RequestParser:
    """Parses requests for one model, each with the key of its sender. Work on large ones is shared out among keys."""

    def __init__(self, llm: ServedModel, tokenizer: Tokenizer, limits: Limits) -> None:
        self.llm, self.tokenizer, self.limits = llm, tokenizer, limits
        self.large = SharedSlots("large requests", LARGE_PORTION, limits.waiting + limits.rows)
        self._grammars = GrammarPool(llm.grammars, limits.grammars)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.llm.target.config.context

    async def completion(self, body: CompletionBody, key: str) -> list[GenerationRequest]:
        """Return one request for each prompt. Raises ApiError."""
        prompts = one_or_many(body.prompt)
        if not prompts:
            raise wrong("prompt", "the prompt is empty; give at least one token of text")
        most = min(self.limits.prompts, self.limits.waiting + self.limits.rows)  # the first need not wait
        if len(prompts) > most:
            raise wrong("prompt", f"{len(prompts)} prompts; send at most {most} in one request")
        if body.echo and body.stream and body.logprobs is not None:
            raise wrong("stream", "an echo with logprobs cannot be streamed; leave out stream, echo or logprobs")
        params = self._params(
            body,
            await _grammar(body, body.response_format),
            # A text of no new tokens is asked for to score the prompt; the token drawn after it is left out later.
            max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens or 1,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        ids = [await self.ids(prompt, key) for prompt in prompts]
        if body.echo:
            check_echo(sum(map(len, ids)), sum(map(len, prompts)), params, self.limits)
        return await self._requests(ids, params, body, key)

    async def chat(self, body: ChatBody, key: str) -> list[GenerationRequest]:
        """Return the request for a conversation. Raises ApiError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs: true")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        tools = self.tools(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        grammar = await _grammar(body, body.response_format, tools)
        params = self._params(body, grammar, max_tokens=max_tokens, logprobs=logprobs)
        ids = await self.conversation(body.messages, key, tools, body.thinks)
        return await self._requests([ids], params, body, key)

    async def response(self, body: ResponsesBody, key: str) -> list[GenerationRequest]:
        """Return the request for instructions and input. Raises ApiError."""
        tools = self.tools(body)
        grammar = await _grammar(body, body.text.format if body.text else None, tools)
        params = self._params(body, grammar, max_tokens=body.max_output_tokens)
        said = turns(body.instructions, body.input)
        ids = await self.conversation(said, key, tools, body.thinks, "input")
        return await self._requests([ids], params, body, key)

    def tools(self, body: ChatBody | ResponsesBody) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError."""
        return body.choose_tools(self.tokenizer.template)

    async def ids(self, prompt: Prompt, key: str, field: str = "prompt") -> list[int]:
        """Return token ids of a text, or check those given, which are a field of the request. Raises ApiError."""
        self._bound(len(prompt) if isinstance(prompt, str) else 0)
        with about(field):
            return await self.apart(len(prompt), key, partial(self.llm.encode, prompt))

    async def tokens(self, text: str, special: bool, key: str) -> list[int]:
        """Return token ids of a text of any length that could be a prompt. Raises ApiError."""
        self._bound(len(text))
        with about("prompt"):
            return await self.apart(len(text), key, partial(self.tokenizer.encode, text, special))

    async def conversation(
        self,
        messages: Sequence[Message],
        key: str,
        tools: ToolChoice | None = None,
        thinking: tuple[str, bool | None] = ("thinking", None),
        field: str = "messages",
    ) -> list[int]:
        """Return token ids of a conversation in the model's chat template. Raises ApiError.

        thinking: the field that says whether the model thinks, and what it says. field: of the conversation.
        """
        if not self.tokenizer.chats:
            raise wrong(field, "this model has no chat template; send a text to /v1/completions instead")
        length = sum(map(characters, messages))
        self._bound(length, field)
        named, thinks = thinking
        if thinks and "enable_thinking" not in self.tokenizer.template:
            raise wrong(named, "this model's chat template has no thinking to turn on; leave it out")

        def laid_out() -> list[int]:
            said = [plain(message) for message in messages]
            return self.llm.encode(self.tokenizer.chat(said, tools.shown if tools else None, thinks))

        with about(field, {"messages": field}):
            return await self.apart(length, key, laid_out)

    async def apart(self, size: int, key: str, work: Callable[[], T]) -> T:
        """Return what `work` returns in a thread, where the event loop need not wait for it; large work has turns."""
        return await (asyncio.to_thread(work) if size <= APART else self.large.run(key, work))

    def _bound(self, characters: int, field: str = "prompt") -> None:
        longest = self.context * self.limits.characters_per_token
        if characters > longest:
            text = f"the prompt has {characters} characters; a context of {self.context} tokens holds {longest} at most"
            raise wrong(field, f"{text}. Shorten it", TOO_LONG)

    async def _requests(
        self, prompts: Sequence[list[int]], params: SamplingParams, body: SamplingFields, key: str
    ) -> list[GenerationRequest]:
        """Return a request for each prompt, once all may be queued. Raises ApiError."""
        requests = [self._request(ids, params, body) for ids in prompts]
        if params.grammar is None:
            return requests
        with about(body.output_format or "tools"):
            compiled = await self._grammars.compile(params.grammar, key)
        return [replace(request, compiled=compiled) for request in requests]

    def _request(self, ids: list[int], params: SamplingParams, body: SamplingFields) -> GenerationRequest:
        with about("logit_bias"):
            check_bias([params], self.llm.target.config.vocab_size)
        params = held_to_room(params, body, len(ids), self.context, self.limits)
        with about("mode"):
            mode = None if body.mode is None else mode_of(body.mode, self.llm.modes)
        progress = isinstance(body, CompletionFields) and bool(body.stream and body.return_progress)
        seeded = params if params.seed is not None else replace(params, seed=drawn_seed())  # the answer tells it
        return GenerationRequest(ids, seeded, mode, progress=progress)

    def _params(
        self, body: SamplingFields, grammar: Grammar | None, *, max_tokens: int | None, **more: int | None
    ) -> SamplingParams:
        values: dict[str, Any] = {
            name: value for name in _PASSED_ON if (value := getattr(body, name, None)) is not None
        }
        check_limit(body, max_tokens, self.context)
        values |= {"max_tokens": ANSWER_TOKENS if max_tokens is None else max_tokens} | more
        if isinstance(body, CompletionFields):
            check_fields(body, more.get("logprobs"), self.limits)
            values["logit_bias"] = biases(body.logit_bias)
        named = self.llm.sampling_defaults
        defaults = named if isinstance(body, CompletionBody) else chat_defaults(named)
        return checked_params(body, defaults | values, grammar)


async def _grammar(
    body: SamplingFields, form: ResponseFormat | FlatResponseFormat | None, tools: ToolChoice | None = None
) -> Grammar | None:
    """Return what the answer is held to, if anything. Raises ApiError."""
    with about(body.output_format or "tools"):
        return await asyncio.to_thread(tools.grammar if tools else partial(grammar_of, form)) if tools or form else None
