"""POST /v1/chat/completions: a conversation, formatted by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import CompletionOutput, RequestOutput
from triforce.server.answer_fields import COMMENT, DONE, EVENT_STREAM, chat_logprobs, decoding_trace, frame, usage
from triforce.server.answers.answer_parts import AnswerParser, Call, Thoughts
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.errors import ApiError, field_error, openai_error
from triforce.server.schemas import (
    PARALLEL_CALLS,
    TOOL_CHOICE,
    CompletionFields,
    ConversationBody,
    FlatResponseFormat,
    ResponseFormat,
    ThinkingSwitch,
)
from triforce.server.service import Service
from triforce.server.tools import MAX_TOOLS, Function, FunctionName, OneTool, Tool
from triforce.server.turns import Message, Messages


class ChatBody(ThinkingSwitch, ConversationBody, CompletionFields):
    """POST /v1/chat/completions."""

    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(("input", "prompt"), "send messages here")
    prompt_field: ClassVar[str] = "messages"
    messages: Messages = Field(description="The whole conversation")
    max_completion_tokens: int | None = Field(None, description="Newer name of max_tokens; it wins where both are sent")
    logprobs: bool | None = Field(None, description="Whether to return log-probabilities of new tokens")
    top_logprobs: int | None = Field(None, description="Alternatives listed at each new token")
    tools: Annotated[list[Tool | None], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call"
    )
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL_CALLS)

    reasoning_effort: str | None = Field(
        None, description="How long the model may think, where its chat template has a choice"
    )

    @property
    def effort(self) -> tuple[str, str | None]:
        return "reasoning_effort", self.reasoning_effort

    @property
    def sent_as(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_tokens": limit, "logprobs": "top_logprobs"}

    @property
    def turns(self) -> Sequence[Message]:
        return self.messages

    @property
    def functions(self) -> Mapping[str, Function]:
        return {f"tools.{i}.function.parameters": tool.function for i, tool in enumerate(self.tools or ()) if tool}

    @property
    def function_choice(self) -> str | FunctionName | None:
        return self.tool_choice.function if isinstance(self.tool_choice, OneTool) else self.tool_choice

    @property
    def has_several_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def answer_constraint(self) -> ResponseFormat | FlatResponseFormat | None:
        return self.response_format

    @property
    def logprob_count(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatWriter:
    """Writes answers as whole messages, or as a stream of increments."""

    media_type = EVENT_STREAM

    def __init__(self, body: ChatBody, generations: Sequence[GenerationRequest], service: Service) -> None:
        self._n = body.n or 1
        self._tokenizer = service.parser.tokenizer
        self._tiers = bool(body.tier_stats)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._new_parser = partial(service.parser.answer_parser, body, generations[0])
        self._choices = [_Choice(self._new_parser()) for _ in range(self._n)]
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": service.name}
        self._head["system_fingerprint"] = service.fingerprint
        self._with_ids = bool(body.return_token_ids)
        self._prompt_ids = {"prompt_token_ids": generations[0].prompt} if self._with_ids else {}
        self._seed = {"seed": generations[0].params.seed}

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [self._choice(completion) for output in outputs for completion in output.outputs]
        answer = {"object": "chat.completion", "choices": choices, "usage": usage(outputs, self._tiers)}
        return self._head | answer | self._prompt_ids

    def opening(self) -> Iterable[bytes]:
        for index in range(self._n):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._chunk(choice, **(self._prompt_ids if index == 0 else {}))

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        empty_choice = {"index": 0, "delta": {}, "finish_reason": None}
        yield self._chunk(empty_choice, prompt_progress=progress.client_fields())

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        answer = self._choices[piece.index]
        thoughts, text, calls = answer.add(piece.text, is_final=piece.finish_reason is not None)
        delta = {"content": text} | ({"reasoning_content": thoughts} if thoughts else {})
        choice = {"index": piece.index, "delta": delta, "finish_reason": None}
        yield self._chunk(choice | self._report(piece) | decoding_trace(piece))
        for call in calls:
            yield self._chunk({"index": piece.index, "delta": {"tool_calls": [call]}, "finish_reason": None})
        if piece.finish_reason:
            finish = answer.finish(piece.finish_reason)
            yield self._chunk({"index": piece.index, "delta": {}, "finish_reason": finish} | self._seed)

    def idle_frame(self) -> bytes:
        return COMMENT

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        yield frame(openai_error(refusal))

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        if self._with_usage:
            yield self._frame({"choices": [], "usage": usage(outputs, self._tiers)})
        yield DONE

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        answer = _Choice(self._new_parser())
        thoughts, text, calls = answer.add(completion.text, is_final=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            listed_calls = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
            message |= {"content": text or None, "tool_calls": listed_calls}
        choice = {
            "index": completion.index,
            "message": message,
            "finish_reason": answer.finish(completion.finish_reason),
        }
        return choice | self._seed | self._report(completion)

    def _report(self, tokens: OutputChunk | CompletionOutput) -> dict[str, Any]:
        """Return the requested log-probabilities, tiers and ids of tokens."""
        logprobs = None if tokens.logprobs is None else chat_logprobs(self._tokenizer, tokens.logprobs)
        report: dict[str, Any] = {"logprobs": logprobs}
        report |= {"token_tiers": tokens.origins} if self._tiers else {}
        return report | ({"token_ids": tokens.token_ids} if self._with_ids else {})

    def _chunk(self, choice: dict[str, Any], **extra_fields: Any) -> bytes:
        return self._frame({"choices": [choice]} | ({"usage": None} if self._with_usage else {}) | extra_fields)

    def _frame(self, data: dict[str, Any]) -> bytes:
        return frame(self._head | {"object": "chat.completion.chunk"} | data)


class _Choice:
    """One growing answer: its thoughts, text and tool calls."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._calls = 0

    def add(self, text: str, is_final: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the new thoughts and text, and the completed calls in order. is_final: `text` ends the answer."""
        parts = self._parser.add(text, is_final)
        thoughts = "".join(part.text for part in parts if isinstance(part, Thoughts))
        calls = [self._numbered_call(part) for part in parts if isinstance(part, Call)]
        return thoughts, "".join(part for part in parts if isinstance(part, str)), calls

    def finish(self, reason: str) -> str:
        """Return the finish reason. An answer that is cut inside a call has `length`, a stopped one with calls has
        `tool_calls`, and any other has `reason`.
        """
        if self._parser.is_cut:
            return "length"
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _numbered_call(self, call: Call) -> dict[str, Any]:
        self._calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": self._calls - 1, "id": f"call_{uuid4().hex}", "type": "function", "function": function}
