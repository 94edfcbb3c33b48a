"""POST /v1/responses, stateless: each request holds the whole conversation, and the server stores nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from time import time
from typing import Annotated, Any, ClassVar, Literal, Self
from uuid import uuid4

from fastapi.responses import Response
from pydantic import Field, ModelWrapValidatorHandler, model_validator

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server.answer_fields import EVENT_STREAM, frame, usage
from triforce.server.answers.answer_parts import AnswerParser, Call, Thoughts
from triforce.server.doors.response_items import InputItems, messages_of
from triforce.server.doors.response_tools import (
    OfferedTool,
    OneFlatTool,
    ResponseTool,
    call_item,
    full_name,
    offered_tools,
)
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.errors import TOO_LONG, ApiError
from triforce.server.request_base import NO_LOGPROBS, Body, unknown_field
from triforce.server.schemas import (
    CONTEXT_NOTE,
    PARALLEL_CALLS,
    TOOL_CHOICE,
    ConversationBody,
    FlatResponseFormat,
    ResponseFormat,
    StreamOptions,
    ThinkingSwitch,
)
from triforce.server.service import Service
from triforce.server.tools import MAX_TOOLS, Function, FunctionName
from triforce.server.turns import Message

ItemEvent = tuple[str, dict[str, Any]]
"""Name of an event without the prefix `response.`, and its fields. The next event may change these fields."""


LOGPROBS = "message.output_text.logprobs"
"""Name of log-probabilities in `include` of responses."""


class TextOptions(Body):
    """`text` of responses."""

    skipped: ClassVar[Collection[str]] = ("verbosity",)
    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("grammar", "json_schema", "name", "regex", "schema", "strict", "type"), "send it in format"
    )
    format: FlatResponseFormat | None = Field(None, description="Constraint on the text")


class Reasoning(Body):
    """`reasoning` of responses."""

    tolerant: ClassVar[bool] = True
    effort: str | None = Field(None, description="How long the model may think, where its chat template has a choice")


class ResponsesBody(ThinkingSwitch, ConversationBody):
    """POST /v1/responses. The server stores nothing between requests."""

    field_advice: ClassVar[Mapping[str, str]] = {"messages": "is called input here"}
    tolerant: ClassVar[bool] = True
    default_limit: ClassVar[int | None] = None
    prompt_field: ClassVar[str] = "input"
    function_kinds: ClassVar[Collection[str]] = ("function", "custom", "namespace")
    choice_kinds: ClassVar[Collection[str]] = ("function", "custom")
    input: str | InputItems = Field(description="A text, or the whole conversation as items")
    instructions: str | None = Field(None, description="System message in front of the input")
    text: TextOptions | None = Field(None, description="Options of the text")
    max_output_tokens: int | None = Field(None, description=f"Default: the rest of the context. {CONTEXT_NOTE}")
    stream_options: StreamOptions | None = Field(None, description="Without effect: every stream ends with usage")
    tools: Annotated[list[ResponseTool | None], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions, tools with free text, and namespaces of both, which the answer may call"
    )
    tool_choice: Literal["none", "auto", "required"] | OneFlatTool | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=PARALLEL_CALLS)
    reasoning: Reasoning | None = None

    @property
    def effort(self) -> tuple[str, str | None]:
        return "reasoning", self.reasoning.effort if self.reasoning else None

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_log_probabilities(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        included = data.get("include") if isinstance(data, dict) else None
        if isinstance(included, list) and LOGPROBS in included:
            raise unknown_field("include", f"{LOGPROBS}: {NO_LOGPROBS}")
        return handler(data)

    @property
    def sent_as(self) -> Mapping[str, str]:
        return {"max_tokens": "max_output_tokens"}

    @property
    def output_format(self) -> str | None:
        return "text" if self.text and self.text.format and self.text.format.type != "text" else None

    @cached_property
    def turns(self) -> Sequence[Message]:
        return messages_of(self.instructions, self.input)

    @property
    def functions(self) -> Mapping[str, Function]:
        return {tool.place: tool.function for tool in offered_tools(self.tools or ())}

    @property
    def function_choice(self) -> str | FunctionName | None:
        choice = self.tool_choice
        return (
            FunctionName(name=full_name(choice.namespace, choice.name)) if isinstance(choice, OneFlatTool) else choice
        )

    @property
    def has_several_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def answer_constraint(self) -> ResponseFormat | FlatResponseFormat | None:
        return self.text.format if self.text else None


class ResponsesWriter:
    """Writes answers of messages and calls. A stream has events for the beginning, growth and end of each part."""

    media_type = EVENT_STREAM

    def __init__(self, body: ResponsesBody, generations: Sequence[GenerationRequest], service: Service) -> None:
        self._tiers = bool(body.tier_stats)
        self._sent = 0
        tools = {tool.function.name: tool for tool in offered_tools(body.tools or ())}
        self._items = Items(service.parser.answer_parser(body, generations[0]), tools)
        self._origins: list[str] = []  # of tokens that no event has reported yet
        self._head = _fields(body, service) | {"seed": generations[0].params.seed}

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for _ in self._items.add(outputs[0].outputs[0].text, is_final=True):
            pass
        for _ in self._items.end(self._status(outputs)):
            pass
        return self._done(outputs)

    def opening(self) -> Iterable[bytes]:
        yield self._event("created", {"response": self._unfinished()})
        yield self._event("in_progress", {"response": self._unfinished()})

    def idle_frame(self) -> bytes:
        """Return an event: clients that measure the time between events skip comments."""
        unchanged: dict[str, Any] = {"instructions": None, "tools": []}  # the first event has told them
        return self._event("in_progress", {"response": self._unfinished() | unchanged})

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        return ()  # responses have no event for progress, and no field to request it

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        self._origins += piece.origins
        for kind, fields in self._items.add(piece.text, is_final=piece.finish_reason is not None):
            yield self._event(kind, fields | (self._report() if kind.endswith(".delta") else {}))

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        status = self._status(outputs)
        for kind, fields in self._items.end(status):
            yield self._event(kind, fields)
        done = self._done(outputs)
        is_full = outputs[0].outputs[0].finish_reason == "length" and self._head["max_output_tokens"] is None
        if is_full:  # Codex would send the request again and again if the response were incomplete
            reason = ApiError(400, "the answer has filled the context; shorten the conversation", code=TOO_LONG)
            status = "failed"
            done |= _failed(reason)
        yield self._event(status, {"response": done} | self._report())

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        yield self._event("failed", {"response": self._unfinished() | _failed(refusal)})

    def _unfinished(self) -> dict[str, Any]:
        return self._head | _UNFINISHED | {"output": self._items.items}

    def _done(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        status = self._status(outputs)
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        counts = usage(outputs, self._tiers, ("input", "output"))
        counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        counts["input_tokens_details"] |= {"cache_write_tokens": 0}
        output_fields = {"output": self._items.items, "usage": counts}
        return self._head | {"status": status, "incomplete_details": details} | output_fields

    def _status(self, outputs: Sequence[RequestOutput]) -> str:
        is_stopped = outputs[0].outputs[0].finish_reason == "stop"
        return "completed" if is_stopped and not self._items.is_cut else "incomplete"

    def _report(self) -> dict[str, Any]:
        """Return the tier of each token since the last report, if the request asks for tiers."""
        pending_origins = self._origins
        self._origins = []
        return {"token_tiers": pending_origins} if self._tiers and pending_origins else {}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._sent += 1
        return _event(kind, self._sent - 1, fields)


class Items:
    """The items of one answer. Its methods are generators; iterate over them even where no events are sent."""

    def __init__(self, parser: AnswerParser, tools: Mapping[str, OfferedTool]) -> None:
        """tools: of the request, by the name that the model sees."""
        self._tools = tools
        self.items: list[dict[str, Any]] = []
        self._parser = parser
        self._open = False  # whether the last item may grow

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended inside a call."""
        return self._parser.is_cut

    def add(self, text: str, is_final: bool) -> Iterator[ItemEvent]:
        """Add text of the answer, and yield its events. is_final: whether `text` ends the answer."""
        for part in self._parser.add(text, is_final):
            match part:
                case Call():
                    yield from self._call(part)
                case Thoughts():
                    yield from self._add_thoughts(part.text)
                case str():
                    yield from self._add_text(part)

    def end(self, status: str) -> Iterator[ItemEvent]:
        """End the answer, and yield the last events. An answer without items gets an empty message."""
        if not self.items:
            yield from self._begin_message()
        yield from self._close(status)

    def _add_thoughts(self, text: str) -> Iterator[ItemEvent]:
        """Add text to the last item if it is one of thoughts, or to a new one."""
        if not self._is_open("reasoning"):
            yield from self._close("completed")
            yield self._begin({"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [_summary("")]})
            self._open = True
            yield "reasoning_summary_part.added", self._place("summary") | {"part": _summary("")}
        self._part["text"] += text
        yield "reasoning_summary_text.delta", self._place("summary") | {"delta": text}

    def _add_text(self, text: str) -> Iterator[ItemEvent]:
        if not self._is_open("message"):
            if not text:
                return
            yield from self._close("completed")
            yield from self._begin_message()
        self._part["text"] += text
        yield "output_text.delta", self._place() | {"delta": text, "logprobs": []}

    def _begin_message(self) -> Iterator[ItemEvent]:
        yield self._begin({"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "content": []})
        self._open = True
        self.items[-1]["content"] = [_part("")]
        yield "content_part.added", self._place() | {"part": _part("")}

    def _call(self, call: Call) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        fields = call_item(call, self._tools)
        is_custom = fields["type"] == "custom_tool_call"
        content, prefix = ("input", "ctc") if is_custom else ("arguments", "fc")
        event = "custom_tool_call_input" if is_custom else "function_call_arguments"
        text = fields[content]
        item = fields | {"id": f"{prefix}_{uuid4().hex}", "call_id": f"call_{uuid4().hex}", content: ""}
        yield self._begin(item)
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield f"{event}.delta", place | {"delta": text}
        name = {} if is_custom else {"name": fields["name"]}
        yield f"{event}.done", place | name | {content: text}
        self.items[-1][content] = text
        yield self._done("completed")

    def _close(self, status: str) -> Iterator[ItemEvent]:
        if self._is_open("reasoning"):
            self._open = False
            yield "reasoning_summary_text.done", self._place("summary") | {"text": self._part["text"]}
            yield "reasoning_summary_part.done", self._place("summary") | {"part": self._part}
            yield self._done(status)
        if self._is_open("message"):
            self._open = False
            yield "output_text.done", self._place() | {"text": self._part["text"], "logprobs": []}
            yield "content_part.done", self._place() | {"part": self._part}
            yield self._done(status)

    def _begin(self, item: dict[str, Any]) -> ItemEvent:
        self.items.append(item | {"status": "in_progress"})
        return "output_item.added", {"output_index": len(self.items) - 1, "item": self.items[-1]}

    def _done(self, status: str) -> ItemEvent:
        self.items[-1]["status"] = status
        return "output_item.done", {"output_index": len(self.items) - 1, "item": self.items[-1]}

    def _is_open(self, kind: str) -> bool:
        """Whether the last item is of this kind and may grow."""
        return self._open and self.items[-1]["type"] == kind

    @property
    def _part(self) -> dict[str, Any]:
        item = self.items[-1]
        part: dict[str, Any] = item["summary" if item["type"] == "reasoning" else "content"][0]
        return part

    def _place(self, parts: str = "content") -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, f"{parts}_index": 0}


_UNFINISHED: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}


def _fields(body: ResponsesBody, service: Service) -> dict[str, Any]:
    """Return the fields of a response that do not depend on the answer."""
    form = body.text.format if body.text else None
    return {
        **{"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time()), "model": service.name},
        **{"error": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens},
        **{"metadata": {}, "store": False, "temperature": body.temperature, "top_p": body.top_p},
        **{"previous_response_id": None, "truncation": "disabled", "system_fingerprint": service.fingerprint},
        **{"text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}}},
        **_tools(body),
    }


def _failed(refusal: ApiError) -> dict[str, Any]:
    """Return the fields of a response that cannot go on."""
    error = {"code": refusal.code or "server_error", "message": refusal.message}
    return {"status": "failed", "incomplete_details": None, "error": error}


def _event(kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
    name = f"response.{kind}"
    return frame({"type": name, "sequence_number": number, **fields}, event=name)


def overflow_stream(body: ResponsesBody, service: Service, refusal: ApiError) -> Response:
    """Return the stream of a request whose prompt exceeds the context.

    Codex shortens its conversation for such an event, and gives up for an HTTP error.
    """
    fields = _fields(body, service) | _UNFINISHED
    frames = [_event("created", 0, {"response": fields}), _event("failed", 1, {"response": fields | _failed(refusal)})]
    return Response(b"".join(frames), headers=body.headers, media_type=EVENT_STREAM)


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """Return the tool fields of the request for its answer."""
    choice = body.tool_choice or "auto"
    return {
        "tools": [tool.model_dump() for tool in body.tools or () if tool],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
