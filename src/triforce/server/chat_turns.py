"""Conversations in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from triforce.server.chat_schemas import CallItem, ChatMessage, Item, Message
from triforce.server.errors import wrong
from triforce.server.schemas import ResponsesBody
from triforce.server.tool_schemas import CalledFunction, ToolCall


def turns(body: ResponsesBody) -> list[Message]:
    """Instructions and input of a response, with the calls of functions in the turns that made them."""
    said: list[Message] = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*said, Message(role="user", content=body.input)]
    for item in body.input:
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
