"""Requests as the engine takes them: token ids and checked parameters, within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.engine.inputs import Prompt, known, one_or_many
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams, chat_defaults
from triforce.sampling.logits import check_bias
from triforce.server.engine_client import GenerationRequest, ServedModel
from triforce.server.errors import wrong
from triforce.server.limits import ANSWER_TOKENS, COMPLETION_TOKENS, Limits
from triforce.server.messages import Message, plain, turns
from triforce.server.schemas import (
    ChatBody,
    CompletionBody,
    CompletionFields,
    ResponsesBody,
    SamplingFields,
    grammar_of,
)
from triforce.server.tools import ToolChoice

_PASSED_ON = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
    *("n", "stop", "presence_penalty", "frequency_penalty", "trace"),
)


@dataclass(frozen=True, slots=True)
class RequestParser:
    """Parses requests for one model."""

    llm: ServedModel
    tokenizer: Tokenizer
    limits: Limits

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.llm.target.config.context

    async def completion(self, body: CompletionBody) -> list[GenerationRequest]:
        """Return one request for each prompt. Raises ApiError or RequestError."""
        prompts = one_or_many(body.prompt)
        most = min(self.limits.prompts, self.limits.waiting + self.limits.rows)  # the first need not wait
        if len(prompts) > most:
            raise wrong("prompt", f"{len(prompts)} prompts; send at most {most} in one request")
        if body.echo and body.stream and body.logprobs is not None:
            raise wrong("stream", "an echo with logprobs cannot be streamed; leave out stream, echo or logprobs")
        params = await self._params(
            body,
            grammar_of(body.response_format),
            # A text of no new tokens is asked for to score the prompt; the token drawn after it is left out later.
            max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens or 1,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        return [self._request(await self.ids(prompt), params, body) for prompt in prompts]

    async def chat(self, body: ChatBody) -> GenerationRequest:
        """Return the request for a conversation. Raises ApiError or RequestError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs: true")
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise wrong("max_tokens", "max_tokens is the old name of max_completion_tokens; send one of them")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        tools = self.tools(body)
        grammar = tools.forced if tools else grammar_of(body.response_format)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = await self._params(body, grammar, max_tokens=max_tokens, logprobs=logprobs)
        return self._request(await self.conversation(body.messages, tools), params, body)

    async def response(self, body: ResponsesBody) -> GenerationRequest:
        """Return the request for instructions and input. Raises ApiError or RequestError."""
        tools = self.tools(body)
        grammar = tools.forced if tools else grammar_of(body.text.format if body.text else None)
        params = await self._params(body, grammar, max_tokens=body.max_output_tokens)
        return self._request(
            await self.conversation(turns(body.instructions, body.input), tools, "input"), params, body
        )

    def tools(self, body: ChatBody | ResponsesBody) -> ToolChoice | None:
        """Return the tools that the answer may call. Raises ApiError or RequestError."""
        return body.choose_tools(self.tokenizer.template)

    async def ids(self, prompt: Prompt) -> list[int]:
        """Return token ids of a text, or check those given. Raises RequestError."""
        self._bound(len(prompt) if isinstance(prompt, str) else 0)
        return await asyncio.to_thread(self.llm.encode, prompt)  # a long text takes a while

    async def tokens(self, text: str, special: bool) -> list[int]:
        """Return token ids of a text of any length that could be a prompt. Raises RequestError."""
        self._bound(len(text))
        return await asyncio.to_thread(self.tokenizer.encode, text, special)

    async def conversation(
        self, messages: Sequence[Message], tools: ToolChoice | None = None, field: str = "messages"
    ) -> list[int]:
        """Return token ids of a conversation in the model's chat template. Raises ApiError or RequestError.

        field: of the request, which it stands in.
        """
        if not self.tokenizer.chats:
            raise wrong(field, "this model has no chat template; send a text to /v1/completions instead")
        plain_messages = [plain(message) for message in messages]
        self._bound(sum(len(turn["content"]) for turn in plain_messages), field)
        shown = tools.shown if tools else None
        return await self.ids(await asyncio.to_thread(self.tokenizer.chat, plain_messages, shown))

    def _bound(self, characters: int, field: str = "prompt") -> None:
        longest = self.context * self.limits.characters_per_token
        if characters > longest:
            raise wrong(field, f"the prompt has {characters} characters; the context of {self.context} tokens "
                        f"cannot hold more than {longest}. Shorten it")  # fmt: skip

    def _request(self, ids: list[int], params: SamplingParams, body: SamplingFields) -> GenerationRequest:
        check_bias([params], self.llm.target.config.vocab_size)
        rows, room = min(params.n, self.limits.rows), min(params.max_tokens, self.context - len(ids))
        most = self.limits.room(self.context)
        if rows * (len(ids) + room) > most:
            raise wrong("n", f"{rows} texts of {len(ids)} + {room} tokens need room for more than the {most} tokens "
                        "that this server has; lower n or max_tokens")  # fmt: skip
        mode = None if body.mode is None else known("mode", body.mode, self.llm.modes)
        progress = isinstance(body, CompletionFields) and bool(body.stream and body.return_progress)
        return GenerationRequest(ids, params, mode, progress=progress)

    async def _params(
        self, body: SamplingFields, grammar: Grammar | None, *, max_tokens: int | None, **more: int | None
    ) -> SamplingParams:
        values: dict[str, Any] = {
            name: value for name in _PASSED_ON if (value := getattr(body, name, None)) is not None
        }
        values |= {"max_tokens": ANSWER_TOKENS if max_tokens is None else max_tokens} | more
        if isinstance(body, CompletionFields):
            self._check(body, more.get("logprobs"))
            values["logit_bias"] = _biases(body.logit_bias)
        if grammar:
            await asyncio.to_thread(self.llm.follow, grammar)  # what is wrong with it is said now
        named = self.llm.sampling_defaults
        defaults = named if isinstance(body, CompletionBody) else chat_defaults(named)
        return SamplingParams(**(defaults | values), grammar=grammar)

    def _check(self, body: CompletionFields, logprobs: int | None) -> None:
        limits = self.limits
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        for name, value, most in (
            ("n", body.n or 1, limits.n),
            ("logprobs", logprobs or 0, limits.logprobs),
            ("stop", len(stops), limits.stops),
            ("logit_bias", len(body.logit_bias or {}), limits.biases),
        ):
            if value > most:
                raise wrong(name, f"{name}: {value} are too many; this server takes at most {most}")
        if any(len(stop) > limits.stop_characters for stop in stops):
            raise wrong("stop", f"a stop string may have {limits.stop_characters} characters; shorten it")
        if body.stream_options and not body.stream:
            raise wrong("stream_options", "stream_options needs stream: true")
        if body.trace and not body.stream:
            raise wrong("trace", "trace needs stream: true")


def _biases(biases: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """Convert keys to integers, which JSON does not have as keys. Raises ApiError."""
    if biases is None:
        return None
    unknown = next((key for key in biases if not (key.isascii() and key.isdecimal() and len(key) < 19)), None)
    if unknown is not None:
        raise wrong("logit_bias", f"logit_bias names {unknown[:30]!r}, which is no token id; keys are integers")
    return {int(key): value for key, value in biases.items()}
