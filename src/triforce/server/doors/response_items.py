"""Items of /v1/responses: turns, calls, results and thoughts of a conversation, as clients send them back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from triforce.server.doors.response_tools import FREE_TEXT, full_name
from triforce.server.errors import field_error
from triforce.server.limits import MAX_MESSAGES
from triforce.server.request_base import Body
from triforce.server.turns import (
    Arguments,
    CalledName,
    ChatMessage,
    Message,
    Parts,
    ToolCall,
    left_out,
    told_call,
    told_turn,
)

TEXT_TYPES = ("text", "input_text", "output_text")


class ItemMeta(Body):
    """Fields of an answer's item that are ignored when the item is sent back."""

    tolerant: ClassVar[bool] = True
    id: str | None = Field(default=None, description="Ignored")
    status: str | None = Field(default=None, description="Ignored")

    def text_parts(self, parts: str | Parts) -> str | Parts:
        """Return content whose parts that are no text are replaced by a note, and named as ignored."""
        if isinstance(parts, str):
            return parts
        texts = list[dict[str, Any]]()
        for part in parts:
            kind = part.get("type")
            if kind in TEXT_TYPES:
                texts.append(part)
                continue
            if kind == "refusal" and isinstance(part.get("refusal"), str):
                texts.append({"type": "text", "text": part["refusal"]})
                continue
            kind = str(kind or "part").removeprefix("input_")
            self.ignore(f"content.{kind}")
            texts.append({"type": "text", "text": left_out(kind)})
        return texts


class Item(Message, ItemMeta):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    type: Literal["message"] | None = None


class CallItem(ItemMeta):
    """A call of a function in an earlier answer. It belongs to the preceding assistant turn, if there is one."""

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    namespace: str | None = None
    arguments: Arguments


class CustomCallItem(ItemMeta):
    """A call of a tool with free text in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: CalledName
    namespace: str | None = None
    input: str


class ShellCallItem(ItemMeta):
    """A command of an older client's shell tool."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: dict[str, Any]


class ResultItem(ItemMeta):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
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


class OtherItem(Body):
    """An item of a tool that is not served, such as web search. It is ignored."""

    tolerant: ClassVar[bool] = True
    type: str


_TAGS = {
    **{kind: kind for kind in ("message", "function_call", "custom_tool_call", "local_shell_call", "reasoning")},
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), "result"),
}


def _tag(item: Any) -> str:
    kind = (item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message"
    return _TAGS.get(kind, "other") if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[Item, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ShellCallItem, Tag("local_shell_call")]
    | Annotated[ResultItem, Tag("result")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_tag),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def messages_of(instructions: str | None, items: str | Sequence[InputItem]) -> list[Message]:
    """Return the messages of a response's instructions and input.

    Calls and thoughts become part of their assistant turns. Raises ApiError for a conversation without a message.
    """
    messages: list[Message] = [told_turn("system", instructions)] if instructions else []
    if isinstance(items, str):
        return [*messages, told_turn("user", items)]
    thoughts = ""
    for item in items:
        match item:
            case OtherItem(type="item_reference"):
                raise field_error("input", "item_reference: answers are not kept here; send the item itself")
            case OtherItem():
                item.ignore(item.type)
                continue
            case ReasoningItem():
                thoughts = item.text
                continue
            case Item():
                messages.append(told_turn(item.role, item.text_parts(item.content)))
            case ResultItem():
                messages.append(told_turn("tool", item.text_parts(item.output), tool_call_id=item.call_id))
            case _:
                _add_call(messages, _call(item))
        if thoughts and isinstance(messages[-1], ChatMessage) and messages[-1].role == "assistant":
            messages[-1].reasoning_content = thoughts
        thoughts = ""
    if not messages:
        raise field_error("input", "input has no message; send a text, or a turn of the user")
    return messages


def _call(item: CallItem | CustomCallItem | ShellCallItem) -> ToolCall:
    match item:
        case CallItem():
            return told_call(item.call_id, full_name(item.namespace, item.name), item.arguments)
        case CustomCallItem():
            return told_call(item.call_id, full_name(item.namespace, item.name), json.dumps({FREE_TEXT: item.input}))
        case ShellCallItem():
            return told_call(item.call_id or item.id or item.type, "local_shell", json.dumps(item.action))


def _add_call(messages: list[Message], call: ToolCall) -> None:
    """Add a call to the last assistant message, or as a new message where the last one has another role."""
    last_message = messages[-1] if messages else None
    if not isinstance(last_message, ChatMessage) or last_message.role != "assistant":
        last_message = told_turn("assistant", "")
        messages.append(last_message)
    last_message.tool_calls = [*(last_message.tool_calls or ()), call]
