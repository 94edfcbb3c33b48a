"""A chat of OpenAI's interface in the form of another door, as far as it has a place there; what is odd stays odd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MESSAGES = "/v1/messages"
OLLAMA = "/api/chat"


def messages_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat in the form of Anthropic's interface."""
    translated = {
        name: value for name, value in body.items() if name not in ("messages", "tools", "tool_choice", "stop")
    }
    translated["messages"] = [turn for message in body["messages"] for turn in _anthropic_turns(message)]
    if "stop" in body:
        translated["stop_sequences"] = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
    if isinstance(body.get("tools"), list):
        translated["tools"] = [_anthropic_tool(tool) for tool in body["tools"]]
    elif "tools" in body:
        translated["tools"] = body["tools"]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        translated["tool_choice"] = {"type": "tool", "name": choice["function"].get("name")}
    elif choice is not None:
        kinds = {"required": "any", "auto": "auto", "none": "none"}
        translated["tool_choice"] = {"type": kinds.get(choice, choice)} if isinstance(choice, str) else choice
    return translated


def _anthropic_turns(message: Any) -> Iterator[Any]:
    if not isinstance(message, dict):
        yield message
        return
    turn = dict(message)
    content = _blocks(turn.get("content"))
    if turn.get("role") == "tool":
        result = {"type": "tool_result", "tool_use_id": turn.get("tool_call_id"), "content": content}
        yield {"role": "user", "content": [result | {"is_error": False}]}
        return
    turn["role"] = "system" if turn.get("role") == "developer" else turn.get("role")
    calls = turn.pop("tool_calls", None)
    thoughts = turn.get("reasoning_content")
    if isinstance(calls, list) or isinstance(thoughts, str):
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        texts = texts if isinstance(texts, list) else [texts]
        before = [{"type": "thinking", "thinking": thoughts, "signature": ""}] if isinstance(thoughts, str) else []
        content = [*before, *texts, *(_tool_use(call) for call in calls or ())]
    yield turn | {"content": content}


def _blocks(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    kinds = {"input_text": "text", "output_text": "text", "image_url": "image"}
    return [
        part | {"type": kinds.get(part.get("type"), part.get("type"))}
        if isinstance(part, dict) and isinstance(part.get("type"), str)
        else part
        for part in content
    ]


def _tool_use(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": _read(function)}


def _read(function: dict[str, Any]) -> Any:
    """Return the arguments of a call as an object, if they are one."""
    try:
        return json.loads(function["arguments"])
    except (ValueError, TypeError, KeyError):
        return {"raw": function.get("arguments")}


def _anthropic_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    names = {"parameters": "input_schema"}
    return {names.get(name, name): value for name, value in function.items()}


def ollama_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a chat in the form of Ollama's interface."""
    options_of = ("temperature", "top_k", "top_p", "seed", "stop", "presence_penalty")
    options = {name: body[name] for name in options_of if name in body}
    options["num_predict"] = body.get("max_tokens")
    kept = ("model", "tools", "cache_salt", "mode", "ignore_eos", "logit_bias", "stop_token_ids", "user", "thinking")
    translated = {name: body[name] for name in kept if name in body}
    form = body.get("response_format")
    if isinstance(form, dict):
        schema = form.get("json_schema")
        translated["format"] = schema.get("schema") if isinstance(schema, dict) else "json"
    return translated | {"options": options, "messages": [_ollama_turn(message) for message in body["messages"]]}


def _ollama_turn(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    turn = dict(message)
    turn["role"] = "system" if turn.get("role") == "developer" else turn.get("role")
    content = turn.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        turn["content"] = "".join(text for text in texts if isinstance(text, str))
    if isinstance(turn.get("tool_calls"), list):
        calls = [call.get("function") if isinstance(call, dict) else call for call in turn["tool_calls"]]
        turn["tool_calls"] = [
            {"function": call | {"arguments": _read(call)}} if isinstance(call, dict) else {"function": call}
            for call in calls
        ]
    thoughts = turn.pop("reasoning_content", None)
    return turn | ({"thinking": thoughts} if isinstance(thoughts, str) else {})
