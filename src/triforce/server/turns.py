"""Turns of a conversation, as the bodies of chats and of responses hold them, and the messages that they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from triforce.interface.messages import REPLAYED_FIELDS, ROLES, TEXT_PART_FIELDS, TEXT_PART_TYPES
from triforce.server.errors import field_error
from triforce.server.limits import MAX_CALLS, MAX_MESSAGES, MAX_PARTS
from triforce.server.request_base import (
    Body,
)

MAX_ARGUMENTS = 2**18
"""Maximal length of a call's arguments in characters."""
Part = dict[str, Any]
"""A part of a turn's content. Only text parts are supported."""
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


Arguments = Annotated[
    str,
    Field(description="A JSON object; an empty text stands for an object without fields", max_length=MAX_ARGUMENTS),
    AfterValidator(lambda text: text if text.strip() else "{}"),
]


CalledName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
"""Name of a function that a model called, which may be none of the request's."""


class CalledFunction(Body):
    tolerant: ClassVar[bool] = True
    name: CalledName
    arguments: Arguments


class ToolCall(Body):
    """A tool call of an earlier answer."""

    tolerant: ClassVar[bool] = True
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A turn of a conversation. Fields of this server's own answers are accepted."""

    field_advice: ClassVar[Mapping[str, str]] = {
        "function_call": 'send a call in tool_calls: [{"id": ..., "type": "function", '
        '"function": {...}}], and its result in a turn of role tool',
        "thinking": "send it beside messages, as a field of the request",
    }
    skipped: ClassVar[Collection[str]] = REPLAYED_FIELDS
    role: str = Field(description=", ".join(ROLES))
    content: str | Parts = Field(description=f"parts are `{{type, text}}`, of type {', '.join(TEXT_PART_TYPES)}")
    annotations: list[Any] | None = Field(default=None, description="Ignored, as a part of an earlier answer")
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @classmethod
    def tolerates(cls, data: Mapping[str, Any]) -> bool:
        """Turns of the assistant and of tools are sent back as clients stored them."""
        return data.get("role") in ("assistant", "tool")

    @model_validator(mode="after")
    def _drop_client_fields(self) -> Self:
        """Drop what clients add to text parts, such as marks for a cache. Other parts are refused by their type."""
        if isinstance(self.content, list):
            parts = [{name: value for name, value in part.items() if value is not None} for part in self.content]
            texts = [part for part in parts if part.get("type") in TEXT_PART_TYPES]
            added_names = {name for part in texts for name in part.keys() - TEXT_PART_FIELDS}
            self.ignore(*(f"content.{name}" for name in added_names))
            for part in texts:
                for name in part.keys() - TEXT_PART_FIELDS:
                    del part[name]
            self.content = parts
        return self


class ChatMessage(Message):
    """A turn of a chat. Tool calls and their results are turns too."""

    content: str | Parts | None = Field(default=None, description="A text, or parts of it")  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        default=None, description="Calls of an assistant's turn"
    )
    tool_call_id: str | None = Field(default=None, description="The call that a turn of role tool answers")
    name: str | None = Field(default=None, description="Of the speaker or the function; a template may show it")
    reasoning_content: Any = Field(default=None, description="Thoughts of an earlier answer; a template may show them")

    refusal: str | None = Field(default=None, description="The text of an earlier answer without content")

    @model_validator(mode="after")
    def _require_call_id(self) -> Self:
        if self.content is None:
            self.content = self.refusal
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("tool", "role tool needs the tool_call_id of the call that it answers")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ItemMeta(Body):
    """Fields of an answer's item that are ignored when the item is sent back."""

    tolerant: ClassVar[bool] = True
    id: str | None = Field(default=None, description="Ignored")
    status: str | None = Field(default=None, description="Ignored")


class Item(Message, ItemMeta):
    """A turn of a conversation, in the form of /v1/responses."""

    role: Literal["system", "developer", "user", "assistant"]
    type: Literal["message"] | None = None


class CallItem(ItemMeta):
    """A tool call of an earlier answer. It belongs to the preceding assistant turn, if there is one."""

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: Arguments


class ResultItem(ItemMeta):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(ItemMeta):
    """Thoughts of an earlier answer. They belong to the assistant turn or the call that follows."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None

    @property
    def text(self) -> str:
        """The thoughts as text."""
        parts = [*(self.content or self.summary or ())]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))


def _item_type(item: Any) -> Any:
    return (item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message"


InputItem = Annotated[
    Annotated[Item, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="an item is a message, a reasoning, a function_call or a function_call_output",
    ),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def messages_of(instructions: str | None, items: str | Sequence[InputItem]) -> list[Message]:
    """Return the messages of a response's instructions and input.

    Function calls and thoughts become part of their assistant turns.
    """
    messages: list[Message] = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    thoughts = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts = item.text
            continue
        if isinstance(item, Item):
            messages.append(ChatMessage(role=item.role, content=item.content) if item.role == "assistant" else item)
        elif isinstance(item, CallItem):
            _add_call(messages, item)
        else:
            messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
        if thoughts and isinstance(messages[-1], ChatMessage) and messages[-1].role == "assistant":
            messages[-1].reasoning_content = thoughts
        thoughts = ""
    if not messages:
        raise field_error("input", "input has no message; send a text, or a turn of the user")
    return messages


def _add_call(messages: list[Message], item: CallItem) -> None:
    """Add a call to the last assistant message, or as a new message where the last one has another role."""
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    last_message = messages[-1] if messages else None
    if not isinstance(last_message, ChatMessage) or last_message.role != "assistant":
        last_message = ChatMessage(role="assistant")
        messages.append(last_message)
    last_message.tool_calls = [*(last_message.tool_calls or ()), call]


def message_length(message: Message) -> int:
    """Return the length in characters of a message's content and name, and of its calls' arguments."""
    content = message.content or ""
    length = len(content) if isinstance(content, str) else sum(len(str(part.get("text", ""))) for part in content)
    length += len(getattr(message, "name", None) or "")
    length += len(thoughts) if isinstance(thoughts := getattr(message, "reasoning_content", None), str) else 0
    return length + sum(len(call.function.arguments) for call in message.tool_calls or ())


def message_dict(message: Message, template: str) -> dict[str, Any]:
    """Return a message in the form that `interface.messages` reads. template: the chat template."""
    turn = message.model_dump(include={"role", "content", "tool_calls", "tool_call_id", "name"})
    thoughts = getattr(message, "reasoning_content", None)
    field = thoughts_field(template)
    return turn | ({field: thoughts} if field and isinstance(thoughts, str) else {})


def thoughts_field(template: str) -> str | None:
    """Return the field of a turn in which a chat template reads earlier thoughts, or None if it reads none."""
    fields = {"reasoning_content": "reasoning_content", "message.thinking": "thinking"}  # the second is gpt-oss's
    return next((name for text, name in fields.items() if text in template), None)
