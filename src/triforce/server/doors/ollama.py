"""/api: the part of Ollama's interface that Cline, Continue and Open WebUI use. Streams are lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server.answers.answer_parts import AnswerParser, Call, Thoughts
from triforce.server.engine_client import PrefillProgress
from triforce.server.errors import ApiError, field_error, ollama_error
from triforce.server.limits import MAX_CALLS, MAX_MESSAGES
from triforce.server.request_base import FOREIGN_FIELDS, LATEST, Body, Stops
from triforce.server.schemas import (
    CONTEXT_NOTE,
    CompletionBody,
    ConversationBody,
    FlatResponseFormat,
    FlatSchemaFormat,
    JsonFormat,
    JsonSchemaSpec,
    ModelField,
    ResponseFormat,
    SchemaFormat,
)
from triforce.server.service import Service
from triforce.server.tools import MAX_TOOLS, Function, FunctionName, Tool, check_size
from triforce.server.turns import CalledName, Message, ToolCall, left_out, told_call, told_turn

OLLAMA_VERSION = "0.13.5"
"""Version of Ollama whose interface this is. Clients refuse to speak to an older one than they know."""


class OllamaFunction(Body):
    tolerant: ClassVar[bool] = True
    name: CalledName
    arguments: Annotated[dict[str, Any], AfterValidator(check_size)] | None = None


class OllamaCall(Body):
    """A call of an earlier answer."""

    tolerant: ClassVar[bool] = True
    id: str | None = None
    function: OllamaFunction


class OllamaTurn(Body):
    tolerant: ClassVar[bool] = True
    role: Literal["system", "user", "assistant", "tool", "thinking"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Body):
    """Sampling parameters. Those of memory and devices are ignored."""

    example: ClassVar[str] = '{"temperature": 0}'
    tolerant: ClassVar[bool] = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(None, description=f"Default: the rest of the context, as with -1. {CONTEXT_NOTE}")
    stop: str | Stops | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


SAMPLING_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
"""Names of options by parameter of `SamplingParams`, where they differ."""


class OllamaBody(ConversationBody):
    """Fields of chats and of single prompts."""

    tolerant: ClassVar[bool] = True
    skipped: ClassVar[Collection[str]] = FOREIGN_FIELDS - {"max_output_tokens", "suffix"}
    default_limit: ClassVar[int | None] = None
    thinking_is_hint: ClassVar[bool] = True
    thinking_field: ClassVar[str] = "think"
    stream: bool | None = Field(True, description="Stream the answer as lines of JSON")
    options: OllamaOptions | None = Field(None, description="Sampling parameters")
    max_output_tokens: int | None = Field(None, description="As options.num_predict; Cline sends it")
    format: Literal["", "json"] | Annotated[dict[str, Any], AfterValidator(check_size)] | None = Field(
        None, description="`json`, or a JSON schema of the answer"
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Whether, or how long, the model thinks before it answers"
    )

    @property
    def sent_as(self) -> Mapping[str, str]:
        names = {name: name for name in OllamaOptions.model_fields} | SAMPLING_NAMES
        return {name: f"options.{sent_name}" for name, sent_name in names.items()}

    @property
    def sampling_values(self) -> dict[str, Any]:
        options = self.options.model_dump(exclude_none=True) if self.options else {}
        sampling_names = {sent_name: name for name, sent_name in SAMPLING_NAMES.items()}
        renamed_options = {sampling_names.get(name, name): value for name, value in options.items()}
        renamed_options.pop("max_tokens", None)
        return super().sampling_values | renamed_options

    @property
    def token_limit(self) -> int | None:
        limit = self.options.num_predict if self.options else None
        limit = self.max_output_tokens if limit is None else limit
        return None if limit is not None and limit < 0 else limit

    @property
    def effort(self) -> tuple[str, str | None]:
        return "think", self.think if isinstance(self.think, str) else None

    @property
    def thinks(self) -> bool | None:
        return self.think if isinstance(self.think, bool) else None

    @property
    def output_format(self) -> str | None:
        return "format" if self.format else None

    @property
    def answer_constraint(self) -> FlatResponseFormat | None:
        if isinstance(self.format, dict):
            return FlatSchemaFormat(type="json_schema", schema=self.format)
        return JsonFormat(type="json_object") if self.format else None

    @property
    def function_choice(self) -> str | FunctionName | None:
        return None

    @property
    def has_several_calls(self) -> bool:
        return True


class OllamaChatBody(OllamaBody):
    """POST /api/chat. A request without messages asks whether the model is loaded."""

    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[OllamaTurn], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description="The whole conversation"
    )
    tools: Annotated[list[Tool | None], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call"
    )

    @cached_property
    def turns(self) -> Sequence[Message]:
        """The conversation. Calls have ids only here: a result belongs to the first open call, of its tool if named."""
        turns: list[Message] = []
        open_calls: list[ToolCall] = []
        thoughts = ""
        for turn in self.messages or ():
            if turn.role == "thinking":  # Continue's turn for the thoughts of the next answer
                thoughts = turn.content or ""
                continue
            content = "\n".join(filter(None, [turn.content, *(left_out("image") for _ in turn.images or ())]))
            if turn.images:
                self.ignore("messages.images")
            calls = None
            call_id = None
            if turn.role == "assistant" and turn.tool_calls:
                calls = [_call(call, f"call_{len(turns)}_{i}") for i, call in enumerate(turn.tool_calls)]
                open_calls = list(calls)
            elif turn.role == "tool":
                called = [call for call in open_calls if turn.tool_call_id == call.id]
                named_calls = [call for call in open_calls if turn.tool_name in (None, call.function.name)]
                answered_call = next(iter([*called, *named_calls, *open_calls]), None)
                if answered_call:
                    open_calls.remove(answered_call)
                call_id = turn.tool_call_id or (answered_call.id if answered_call else "call_unknown")
            before = thoughts if turn.role == "assistant" else ""
            turns.append(
                told_turn(
                    turn.role,
                    content,
                    tool_calls=calls,
                    tool_call_id=call_id,
                    name=turn.tool_name,
                    reasoning_content=turn.thinking or before or None,
                )
            )
            thoughts = ""
        if not turns:
            raise field_error("messages", "messages has no text; send a turn of the user")
        return turns

    @property
    def functions(self) -> Mapping[str, Function]:
        return {f"tools.{i}.function.parameters": tool.function for i, tool in enumerate(self.tools or ()) if tool}


def _call(call: OllamaCall, call_id: str) -> ToolCall:
    return told_call(call.id or call_id, call.function.name, json.dumps(call.function.arguments or {}))


class GenerateBody(OllamaBody):
    """POST /api/generate: one prompt. A request without one asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = Field(None, description="System message in front of the prompt")
    raw: bool | None = Field(None, description="Continue the prompt as it is, without the chat template")

    @cached_property
    def turns(self) -> Sequence[Message]:
        system = [told_turn("system", self.system)] if self.system else []
        return [*system, told_turn("user", self.prompt or "")]

    @property
    def functions(self) -> Mapping[str, Function]:
        return {}

    def completion(self, context: int) -> CompletionBody:
        """Return the request that continues the prompt without a chat template. context: of the model in tokens."""
        self.ignore(*(name for name in ("system", "think") if getattr(self, name) is not None))
        if self.token_limit == 0:
            raise field_error("options.num_predict", "options.num_predict must be an integer, at least 1")
        form: ResponseFormat | None = None
        if self.format:
            spec = JsonSchemaSpec(schema=self.format) if isinstance(self.format, dict) else None
            form = SchemaFormat(type="json_schema", json_schema=spec) if spec else JsonFormat(type="json_object")
        return CompletionBody(
            prompt=self.prompt or "",
            max_tokens=context if self.token_limit is None else self.token_limit,
            mode=self.mode,
            response_format=form,
            **self.sampling_values,
        )


class ShowBody(ModelField):
    """POST /api/show."""

    tolerant: ClassVar[bool] = True
    name: str | None = Field(None, description="Older name of model")


class OllamaWriter:
    """Writes answers of chats, whose parts are messages, and of single prompts, whose parts are texts."""

    media_type = "application/x-ndjson"

    def __init__(self, body: OllamaBody, service: Service, parser: AnswerParser) -> None:
        """parser: of the answer."""
        self._parser = parser
        self._is_chat = isinstance(body, OllamaChatBody)
        self._name = service.name

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._object(self._fields(outputs[0].outputs[0].text, is_final=True)) | self._end(outputs[0])

    def opening(self) -> Iterable[bytes]:
        return ()

    def idle_frame(self) -> bytes:
        return _line(self._object({}))

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        return ()  # this interface has no object for progress, and no field to request it

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        if fields := self._fields(piece.text, is_final=piece.finish_reason is not None):
            yield _line(self._object(fields))

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        yield _line(self._object({}) | self._end(outputs[0]))

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        yield _line(ollama_error(refusal))

    def _fields(self, text: str, is_final: bool) -> dict[str, Any]:
        """Return the new parts of the answer: text, thoughts and calls."""
        parts = self._parser.add(text, is_final)
        content = "".join(part for part in parts if isinstance(part, str))
        thoughts = "".join(part.text for part in parts if isinstance(part, Thoughts))
        calls = [part for part in parts if isinstance(part, Call)]
        fields: dict[str, Any] = {"content": content} if content else {}
        if thoughts:
            fields["thinking"] = thoughts
        if calls:
            functions = [{"name": call.name, "arguments": call.values()} for call in calls]
            fields["tool_calls"] = [{"function": function} for function in functions]
        return fields

    def _object(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return _answer(self._name, fields, self._is_chat)

    def _end(self, output: RequestOutput) -> dict[str, Any]:
        is_cut = self._parser.is_cut
        counts = {
            "total_duration": output.prefill_seconds + output.decode_seconds,
            "load_duration": 0.0,
            "prompt_eval_duration": output.prefill_seconds,
            "eval_duration": output.decode_seconds,
        }
        return {
            "done": True,
            "done_reason": "length" if is_cut else output.outputs[0].finish_reason,
            "prompt_eval_count": output.prompt_tokens,
            "eval_count": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        } | {name: int(seconds * 1e9) for name, seconds in counts.items()}


def _answer(name: str, fields: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    head = {"model": name, "created_at": _now(), "done": False}
    if is_chat:
        return head | {"message": {"role": "assistant", "content": "", **fields}}
    renamed_fields = {"response" if field == "content" else field: value for field, value in fields.items()}
    return head | {"response": "", **renamed_fields}


def loaded(service: Service, *, is_chat: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt: the model is loaded."""
    return _answer(service.name, {}, is_chat) | {"done": True, "done_reason": "load"}


def loaded_card(service: Service) -> dict[str, Any]:
    """Return the served model as the list of loaded models shows it. It stays loaded."""
    far_future = "2999-01-01T00:00:00Z"
    return model_card(service) | {"expires_at": far_future, "size_vram": 0, "context_length": service.parser.context}


def model_card(service: Service) -> dict[str, Any]:
    """Return the served model as the lists of models show it."""
    digest = service.fingerprint.removeprefix("fp_").ljust(64, "0")
    details = {"parent_model": "", "format": "triforce", "family": "triforce", "families": ["triforce"]}
    details |= {"parameter_size": "", "quantization_level": ""}
    tagged_name = service.name if ":" in service.name else f"{service.name}{LATEST}"
    names = {"name": tagged_name, "model": tagged_name, "modified_at": _now(), "size": 0, "digest": digest}
    return names | {"details": details}


def shown_model(service: Service) -> dict[str, Any]:
    """Return what clients read of a model: its context and what it can do."""
    capabilities = ["completion"]
    if service.parser.answers.calls is not None and service.parser.tokenizer.chats:
        capabilities.append("tools")
    if service.parser.answers.has_thoughts:
        capabilities.append("thinking")
    info = {"general.architecture": "triforce", "triforce.context_length": service.parser.context}
    texts = {"modelfile": "", "parameters": "", "template": service.parser.tokenizer.template}
    return texts | {"details": model_card(service)["details"], "model_info": info, "capabilities": capabilities}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, allow_nan=False).encode() + b"\n"
