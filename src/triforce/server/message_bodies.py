"""Turns of a conversation as chats and responses send them. `interface.messages` reads what they mean."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from triforce.interface.messages import ROLES, TEXTS
from triforce.server.limits import MOST_CALLS, MOST_MESSAGES, MOST_PARTS
from triforce.server.request_base import Body
from triforce.server.tools import Name

MOST_ARGUMENTS = 2**18
"""Characters of the arguments of a call."""
Part = dict[str, Any]
"""A part of what a turn says. Those of a text are read."""
REPLAYED = ("index", "metadata", "parsed", "phase", "provider_specific_fields", "reasoning", "reasoning_content")
"""Fields that clients of this and of other servers keep beside an answer."""
Parts = Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


Arguments = Annotated[
    str,
    Field(description="A JSON object; an empty text is one without arguments", max_length=MOST_ARGUMENTS),
    AfterValidator(lambda text: text if text.strip() else "{}"),
]


class CalledFunction(Body):
    replayed: ClassVar[Collection[str]] = ("parsed_arguments",)
    name: Name
    arguments: Arguments


class ToolCall(Body):
    """A call that was made earlier."""

    replayed: ClassVar[Collection[str]] = ("index",)
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A turn of a conversation. Fields that our own answers have beside the text are accepted."""

    called: ClassVar[Mapping[str, str]] = {
        "audio": "this is a text model; leave it out",
        "function_call": 'a call stands in tool_calls here: [{"id": ..., "type": "function", '
        '"function": {...}}], and what it gave in a turn of role tool',
        "refusal": "send what was said as content",
        "thinking": "it belongs beside messages, not into one",
    }
    replayed: ClassVar[Collection[str]] = REPLAYED
    role: str = Field(description=", ".join(ROLES))
    content: str | Parts = Field(description=f"parts are `{{type, text}}`, of type {', '.join(TEXTS)}")
    annotations: list[Any] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _leave_out_what_clients_add_to_parts(self) -> Self:
        if isinstance(self.content, list):
            if any(part.get("parsed") is not None for part in self.content):
                self._ignored = [*self._ignored, "content.parsed"]
            self.content = [{k: v for k, v in part.items() if v is not None and k != "parsed"} for part in self.content]
        return self


class ChatMessage(Message):
    """A turn of a chat. Tool calls and their results are turns too."""

    content: str | Parts | None = None  # type: ignore[assignment]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = Field(default=None, description="Of who speaks, or of the function; a template may show it")

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

    replayed: ClassVar[Collection[str]] = ("parsed_arguments",)
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: Arguments


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
    said += len(getattr(message, "name", None) or "")
    return said + sum(len(call.function.arguments) for call in message.tool_calls or ())


def plain(message: Message) -> dict[str, Any]:
    """Return a message as `interface.messages` reads it."""
    return message.model_dump(include={"role", "content", "tool_calls", "tool_call_id", "name"})
