"""Turns of a conversation as chats and responses send them. `interface.messages` reads what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from triforce.interface.messages import ROLES, TEXTS
from triforce.server.limits import MOST_CALLS, MOST_MESSAGES, MOST_PARTS
from triforce.server.request_base import Body
from triforce.server.tools import MOST_ARGUMENTS, CalledFunction, Name, ToolCall

Part = dict[str, Any]
"""A part of what a turn says. Those of a text are read."""
Parts = Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


class Message(Body):
    """A turn of a conversation. Fields that our own answers have beside the text are accepted."""

    role: str = Field(description=", ".join(ROLES))
    content: str | Parts = Field(description=f"parts are `{{type, text}}`, of type {', '.join(TEXTS)}")
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatMessage(Message):
    """A turn of a chat. Tool calls and their results are turns too."""

    content: str | Parts | None = None  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _name_the_call(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("tool", "role tool needs the tool_call_id of the call that it answers")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ItemMeta(Body):
    """Fields that an item of an answer carries and that are ignored when it is sent back."""

    id: str | None = None
    status: str | None = None


class Item(Message, ItemMeta):
    """A turn of a conversation, as /v1/responses has it."""

    role: Literal["system", "developer", "user", "assistant"]
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
    said = len(content) if isinstance(content, str) else sum(len(str(part.get("text", ""))) for part in content)
    return said + sum(len(call.function.arguments) for call in message.tool_calls or ())


def plain(message: Message) -> dict[str, Any]:
    """Return a message as `interface.messages` reads it."""
    return message.model_dump(include={"role", "content", "tool_calls", "tool_call_id"})
