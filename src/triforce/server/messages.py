"""Turns of a conversation: as chats and responses have them, and as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, ModelWrapValidatorHandler, Tag, model_validator
from pydantic_core import PydanticCustomError

from triforce.server.errors import wrong
from triforce.server.limits import MOST_CALLS, MOST_MESSAGES, MOST_PARTS
from triforce.server.request_base import Body
from triforce.server.tools import MOST_ARGUMENTS, CalledFunction, Name, ToolCall


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _be_text(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            shown = {"kind": ascii(kind[:60])}
            raise PydanticCustomError("part", "only text parts are read here, and this is {kind}; leave it out", shown)
        return handler(data)


Parts = Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]


class Message(Body):
    """A turn of a conversation. Fields that our own answers have beside the text are accepted."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatMessage(Message):
    """A turn of a chat. Tool calls and their results are turns too."""

    role: Literal["system", "developer", "user", "assistant", "tool"]  # type: ignore[assignment]
    content: str | Parts | None = None  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("no_content", "content is required where there are no tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "tool_calls are the assistant's")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("tool", "role tool and tool_call_id belong together")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ItemMeta(Body):
    """Fields that an item of an answer carries and that are ignored when it is sent back."""

    id: str | None = None
    status: str | None = None


class Item(Message, ItemMeta):
    """A turn of a conversation, as /v1/responses has it."""

    type: Literal["message"] | None = None


class CallItem(ItemMeta):
    """A call that was made earlier. It belongs to the assistant's turn before it, if there is one."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str = Field(description="A JSON object", max_length=MOST_ARGUMENTS)


class ResultItem(ItemMeta):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


def _kind(item: Any) -> Any:
    return (item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message"


InputItem = Annotated[
    Annotated[Item, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="an item is a message, a function_call or a function_call_output",
    ),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


def turns(instructions: str | None, items: str | Sequence[Item | CallItem | ResultItem]) -> list[Message]:
    """Instructions and input of a response, with the calls of functions in the turns that made them."""
    said: list[Message] = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(items, str):
        return [*said, Message(role="user", content=items)]
    for item in items:
        if isinstance(item, Item):
            said.append(item)
        elif isinstance(item, CallItem):
            _call(said, item)
        else:
            said.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
    return said


def _call(said: list[Message], item: CallItem) -> None:
    """The assistant's turn has a call, too; if somebody else spoke last, it is a turn of its own."""
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    last = said[-1] if said and said[-1].role == "assistant" else None
    if last and last.tool_calls:
        last.tool_calls.append(call)
        return
    if last:
        said.pop()
    said.append(ChatMessage(role="assistant", content=last.content if last else None, tool_calls=[call]))


def characters(message: Message) -> int:
    """Return the length of what a message says, and of the arguments of its calls."""
    content = message.content or ""
    said = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    return said + sum(len(call.function.arguments) for call in message.tool_calls or ())


def plain(message: Message) -> dict[str, Any]:
    """Return a message as chat templates take it: developer as system, parts joined, arguments parsed."""
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if isinstance(message, ChatMessage) and message.tool_calls:
        called = [call.function for call in message.tool_calls]
        functions = [{"name": function.name, "arguments": _arguments(function.arguments)} for function in called]
        turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    if isinstance(message, ChatMessage) and message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _arguments(text: str) -> dict[str, Any]:
    try:
        if isinstance(arguments := json.loads(text), dict):
            return arguments
    except (ValueError, RecursionError):
        pass
    raise wrong("messages", "the arguments of a call are no JSON object; send them as they came")
