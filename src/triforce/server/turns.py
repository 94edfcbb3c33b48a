"""Turns of a conversation, as the bodies of chats hold them. Other doors translate their own turns into these."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from triforce.interface.messages import REPLAYED_FIELDS, ROLES, TEXT_PART_FIELDS, TEXT_PART_TYPES
from triforce.server.limits import MAX_CALLS, MAX_MESSAGES, MAX_PARTS
from triforce.server.request_base import (
    Body,
)

MAX_ARGUMENTS = 2**18
"""Maximal length of a call's arguments in characters."""


def left_out(kind: str) -> str:
    """Return the text in place of a part that is no text. Later turns may refer to it. kind: of the part."""
    return f"[{kind if kind.isidentifier() else 'part'} left out: this model reads text only]"


Part = dict[str, Any]
"""A part of a turn's content. Only text parts are supported."""
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


Arguments = Annotated[
    str,
    Field(description="A JSON object; an empty text stands for an object without fields", max_length=MAX_ARGUMENTS),
    AfterValidator(lambda text: text if text.strip() else "{}"),
]


CalledName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
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


def told_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Return a call of another door, whose body has been checked."""
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call_id, function=function)


def told_turn(role: str, content: str | Parts, **fields: Any) -> ChatMessage:
    """Return a turn of another door, whose body has been checked. fields: others of a chat's turn."""
    return ChatMessage.model_construct(role=role, content=content, **fields)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def message_length(message: Message) -> int:
    """Return the length in characters of a message's content and name, and of its calls' arguments."""
    content = message.content or ""
    length = len(content) if isinstance(content, str) else sum(len(str(part.get("text", ""))) for part in content)
    length += len(getattr(message, "name", None) or "")
    length += len(thoughts) if isinstance(thoughts := getattr(message, "reasoning_content", None), str) else 0
    return length + sum(len(call.function.arguments) for call in message.tool_calls or ())


def with_leading_system(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in which system turns behind the first turn are a part of a user's turn.

    Some chat templates take a system turn at the start only, and users' turns only with answers between them.
    """
    told_turns: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        is_asked = turn["role"] == "user" or (place > 0 and turn["role"] in ("system", "developer"))
        if is_asked and told_turns and told_turns[-1]["role"] == "user":
            texts = [[{"type": "text", "text": c}] if isinstance(c := t["content"], str) else list(c or ())
                     for t in (told_turns[-1], turn)]  # fmt: skip
            told_turns[-1] = told_turns[-1] | {"content": [*texts[0], {"type": "text", "text": "\n\n"}, *texts[1]]}
        else:
            told_turns.append(turn | {"role": "user"} if is_asked else turn)
    return told_turns


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
