"""Messages: turns of a conversation, converted from the API's forms into the form of chat templates.

Library, server, batch and chat convert them here, through `Tokenizer.chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from triforce.errors import RequestError, argument, suggest

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PART_TYPES = ("text", "input_text", "output_text")
"""Types of text parts of a turn."""
TEXT_PART_FIELDS = {"type", "text", "annotations", "logprobs"}
"""Fields of a text part. Answers of /v1/responses contain the last two."""
TURN_FIELDS = {"content", "name", "role", "tool_call_id", "tool_calls"}
REPLAYED_FIELDS = (
    *("cache_control", "id", "index", "metadata", "parsed", "phase", "provider_specific_fields", "reasoning"),
    *("reasoning_content", "refusal", "timestamp"),
)
"""Fields that clients store with a turn and send back. A template may ignore them."""

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
"""Marks around a call in the text of many models, and of those whose chat template has no form of calls."""
SHORT_IDS = "length 9"
"""Words of chat templates that refuse other ids of calls."""
BROKEN_ARGUMENTS = "invalid_json"
"""Field of a call's arguments in a chat template, for arguments that a model wrote and that are no JSON object."""

Message = Mapping[str, Any]
"""One turn: a role, and content (a text or a list of parts), tool calls or both."""


def read_messages(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Return turns in the form of chat templates. Raises RequestError that names the place of an invalid turn.

    The role developer becomes system, parts are joined into one text, and arguments of calls are parsed into objects.
    template: the chat template; other fields are passed on to it if its text names them, and refused else.
    """
    return [_turn(message, template, f"{argument('messages')}[{i}]") for i, message in enumerate(messages)]


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the form of chat templates: `{"type": "function", "function": {"name": ..., ...}}` each.

    Raises RequestError that names the place of an invalid tool.
    """
    return [_tool(tool, f"{argument('tools')}[{i}]") for i, tool in enumerate(tools)]


def _turn(message: Any, template: str, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f'{place} is no message; write it as {{"role": "user", "content": "Hello"}}')
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    content = fields.get("content")
    calls = fields.get("tool_calls") or []
    if role not in ROLES:
        suggestion = suggest(str(role), ROLES)
        raise RequestError(f"{place}.role: {role!r} is not known{suggestion}; choose from {', '.join(ROLES)}")
    if calls and role != "assistant":
        raise RequestError(
            f"{place}.tool_calls: only turns of the assistant have calls; leave them out of this {role} turn"
        )
    if "tool_call_id" in fields and role != "tool":
        raise RequestError(f"{place}.tool_call_id: only turns of role tool have it; leave it out of this {role} turn")
    if content is None and not calls:
        raise RequestError(f"{place}.content is required; only a turn with tool_calls may lack it")
    accepted_names = TURN_FIELDS.union(REPLAYED_FIELDS, ["annotations"])
    for name in fields:
        if name not in accepted_names and str(name) not in template:
            suggestion = suggest(str(name), TURN_FIELDS)
            raise RequestError(f"{place}: the chat template reads no field {name!r:.60}{suggestion}; leave it out")
    fields |= {"role": "system" if role == "developer" else role, "content": _text(content or "", f"{place}.content")}
    fields.pop("tool_calls", None)
    fields |= {"tool_calls": _calls(calls, f"{place}.tool_calls")} if calls else {}
    return _with_short_ids(fields) if SHORT_IDS in template else fields


def _with_short_ids(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose ids of calls have nine letters and digits, as templates of Mistral require."""
    for holder, name in ((turn, "tool_call_id"), *((call, "id") for call in turn.get("tool_calls", ()))):
        call_id = holder.get(name)
        if isinstance(call_id, str) and not re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            holder[name] = sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]
    return turn


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{place} is a {type(content).__name__}; it must be a text, or a list of parts of text")
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or kind not in TEXT_PART_TYPES:
        raise RequestError(f'{place} is {kind!r:.60}; only text parts are read: {{"type": "text", "text": ...}}')
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{place}.text must be a text")
    return str(part["text"])


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{place} is a {type(calls).__name__}; it must be a list of calls")
    return [_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, place: str) -> dict[str, Any]:
    function = _function(call, place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{place}: the arguments of a call are not a JSON object; send them as the model wrote them")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _parsed(text: str) -> Mapping[str, Any]:
    """Return the arguments that a text holds. Templates need an object: broken text becomes one that shows it."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return {BROKEN_ARGUMENTS: text}
    return arguments if isinstance(arguments, Mapping) else {BROKEN_ARGUMENTS: text}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    function = _function(tool, place)
    if not isinstance(function.get("parameters", {}), Mapping):
        raise RequestError(f"{place}: the parameters of {function['name']} are not a JSON schema; give an object")
    return {**tool, "type": "function", "function": dict(function)}


def _function(holder: Any, place: str) -> Mapping[str, Any]:
    """Return the function of a tool or a call."""
    function = holder.get("function") if isinstance(holder, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        shape = '{"type": "function", "function": {"name": ..., ...}}'
        raise RequestError(f"{place} names no function; write it as {shape}")
    return function


def ends_in_answer(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last turn is a text of the assistant, which the next answer may continue."""
    return bool(turns) and turns[-1].get("role") == "assistant" and not turns[-1].get("tool_calls")


def told_in_text(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return turns for a chat template without tools: functions, calls and results become text in a plain form.

    turns, tools: in the form of chat templates. The system turn describes the functions; it is added if there is none.
    Results become a turn of the user.
    """
    plain_turns: list[dict[str, Any]] = []
    for turn in turns:
        fields = {name: value for name, value in turn.items() if name not in ("tool_calls", "tool_call_id")}
        if turn["role"] == "tool":
            fields = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        elif calls := turn.get("tool_calls"):
            parts = [fields["content"], *map(_call_text, calls)]
            fields["content"] = "\n".join(part for part in parts if part)
        if (
            plain_turns and plain_turns[-1]["role"] == fields["role"] == "user"
        ):  # many templates refuse two turns in a row
            plain_turns[-1] = plain_turns[-1] | {"content": f"{plain_turns[-1]['content']}\n{fields['content']}"}
        else:
            plain_turns.append(fields)
    if not tools:
        return plain_turns
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = f'{CALL_OPEN}\n{{"name": ..., "arguments": {{...}}}}\n{CALL_CLOSE}'
    text = f"You may call functions. To call one, answer with its name and arguments only:\n{form}\n"
    text += f"These are the functions, with a JSON schema of their parameters:\n{functions}"
    if plain_turns and plain_turns[0]["role"] == "system":
        return [plain_turns[0] | {"content": f"{plain_turns[0]['content']}\n\n{text}"}, *plain_turns[1:]]
    return [{"role": "system", "content": text}, *plain_turns]


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{written}\n{CALL_CLOSE}"
