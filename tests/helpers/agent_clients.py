"""Agents and pages as clients: how each turns an answer of the server into its next request.

tests/data/agents/NAME.json has the first request of each in the shape that its published source gives it, with texts
of our own. `replay` of a client appends the answer and what follows it: results of calls, or a new question.
"""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
from starlette.types import ASGIApp

FOLDER = Path(__file__).parents[1] / "data" / "agents"
RESULT = "def total(xs):\n    return sum(xs)\n"
"""Result of each call."""


class Answer(NamedTuple):
    """What a client reads of an answer. parts: in the client's own form, as it sends them back."""

    parts: Any
    text: str
    calls: list[dict[str, Any]]
    prompt_tokens: int
    cached_tokens: int


def sent(app: ASGIApp, request: dict[str, Any], body: Any = None) -> httpx.Response:
    """Send a request; assert that it is answered."""

    async def go() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            method = request.get("method", "POST")
            return await client.request(method, request["door"], headers=request.get("headers"), json=body)

    response = asyncio.run(go())
    assert response.status_code < 400, (request["door"], response.status_code, response.text)
    return response


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of a stream's events, without comments and the end mark."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class AgentClient:
    """One client. limit: path of the field that limits an answer. conversation: the field of the turns."""

    name: ClassVar[str]
    limit: ClassVar[tuple[str, ...]]
    conversation: ClassVar[str] = "messages"

    def __init__(self) -> None:
        self.recorded: dict[str, Any] = json.loads((FOLDER / f"{self.name}.json").read_text(encoding="utf-8"))
        self.body: dict[str, Any] = self.recorded["body"]

    def limited(self, tokens: int) -> None:
        """Make answers short and greedy, so that they can be compared."""
        *path, field = self.limit
        holder = self.body
        for part in path:
            holder = holder.setdefault(part, {})
        holder[field] = tokens
        self.body["temperature"] = 0
        for holder in (self.body, self.body.get("options", {})):
            for sampled in ("top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty"):
                holder.pop(sampled, None)
            if "temperature" in holder:
                holder["temperature"] = 0

    def lengthen(self, text: str) -> None:
        """Add to the client's own instructions, which are long in truth."""
        self.body["messages"][0]["content"] += text

    def ask(self, app: ASGIApp, **changes: Any) -> Answer:
        """Send the conversation as it stands."""
        return self.read(sent(app, self.recorded, self.body | changes))

    def read(self, response: httpx.Response) -> Answer:
        raise NotImplementedError

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        """Return a function in the form of the door."""
        return {"type": "function", "function": function}

    def replay(self, answer: Answer, text: str) -> None:
        """Append an answer, the results of its calls, and `text` as a new question if it has no calls."""
        raise NotImplementedError


class ChatClient(AgentClient):
    """A client of /v1/chat/completions, as the AI SDK joins its increments."""

    limit = ("max_tokens",)

    def read(self, response: httpx.Response) -> Answer:
        text = thoughts = ""
        calls: dict[int, dict[str, Any]] = {}
        usage: dict[str, Any] = {}
        for chunk in events_of(response):
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                thoughts += delta.get("reasoning_content") or ""
                for part in delta.get("tool_calls", ()):
                    if part["index"] not in calls:
                        assert part["id"] and part["function"]["name"]
                        calls[part["index"]] = {"id": part["id"], "type": "function", "function": part["function"]}
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            turn["tool_calls"] = [self.replayed(call) for call in calls.values()]
        if thoughts:
            turn["reasoning_content"] = thoughts
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return Answer(turn, text, list(calls.values()), usage.get("prompt_tokens", 0), cached)

    def replayed(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call as the client sends it back: its arguments are read and written again."""
        arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
        return call | {"function": call["function"] | {"arguments": arguments}}

    def replay(self, answer: Answer, text: str) -> None:
        turns = [answer.parts]
        turns += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in answer.calls]
        turns += [] if answer.calls else [{"role": "user", "content": text}]
        self.body = self.body | {"messages": self.body["messages"] + turns}


class OpenCode(ChatClient):
    name = "opencode"


class OpenWebUi(ChatClient):
    name = "open_webui"


class Aider(ChatClient):
    """It has no tools, and a reminder in a system turn at the end."""

    name = "aider"

    def __init__(self) -> None:
        super().__init__()
        self.body |= {"stream_options": {"include_usage": True}}

    def replay(self, answer: Answer, text: str) -> None:
        *turns, reminder = self.body["messages"]
        turns += [answer.parts, {"role": "user", "content": text}, reminder]
        self.body = self.body | {"messages": turns}


class Codex(AgentClient):
    """It keeps the items of `response.output_item.done`, and nothing else."""

    name = "codex"
    limit = ("max_output_tokens",)
    conversation = "input"

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "strict": False, **function}

    def lengthen(self, text: str) -> None:
        self.body["instructions"] += text

    def read(self, response: httpx.Response) -> Answer:
        told = events_of(response)
        items = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        last = told[-1]
        assert last["type"] in ("response.completed", "response.incomplete") and last["response"]["id"], last
        usage = last["response"]["usage"]
        assert {"input_tokens", "output_tokens", "total_tokens"} <= usage.keys()
        for item in items:
            if item["type"] == "reasoning":
                assert isinstance(item["summary"], list)
                item["encrypted_content"] = None
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        calls = [item for item in items if item["type"] in ("function_call", "custom_tool_call")]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Answer(items, "".join(texts), calls, usage["input_tokens"], cached)

    def replay(self, answer: Answer, text: str) -> None:
        items = [*answer.parts]
        items += [
            {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": RESULT} for call in answer.calls
        ]
        question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        items += [] if answer.calls else [question]
        self.body = self.body | {"input": self.body["input"] + items}


class ClaudeCode(AgentClient):
    """It moves its mark for the cache to the last block, and sends a system turn as a text the second time."""

    name = "claude_code"
    limit = ("max_tokens",)

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"name": function["name"], "input_schema": function["parameters"]}

    def lengthen(self, text: str) -> None:
        self.body["system"][1]["text"] += text

    def read(self, response: httpx.Response) -> Answer:
        blocks: list[dict[str, Any]] = []
        arguments = ""
        usage: dict[str, Any] = {}
        told = events_of(response)
        assert told[0]["type"] == "message_start" and told[-1]["type"] == "message_stop"
        for event in told:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append(dict(event["content_block"]))
                    arguments = ""
                case "content_block_delta":
                    delta = event["delta"]
                    kind = delta["type"].removesuffix("_delta")
                    if kind == "input_json":
                        arguments += delta["partial_json"]
                    elif kind == "signature":
                        blocks[-1]["signature"] = delta["signature"]
                    else:
                        blocks[-1][kind] += delta[kind]
                case "content_block_stop":
                    if blocks[-1]["type"] == "tool_use":
                        blocks[-1]["input"] = json.loads(arguments)
                case "message_delta":
                    usage = event["usage"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        cached = usage["cache_read_input_tokens"]
        return Answer(blocks, text, calls, usage["input_tokens"] + cached, cached)

    def replay(self, answer: Answer, text: str) -> None:
        turns = deepcopy(self.body["messages"])
        for turn in turns:
            for block in turn["content"] if isinstance(turn["content"], list) else ():
                block.pop("cache_control", None)
        blocks: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT} for call in answer.calls
        ]
        blocks += [] if answer.calls else [{"type": "text", "text": text}]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        turns += [{"role": "assistant", "content": answer.parts}, {"role": "user", "content": blocks}]
        system = deepcopy(self.body["system"])
        system[0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.332.{len(turns):03x}; cc_entrypoint=cli;"
        self.body = self.body | {"messages": turns, "system": system}


class OllamaClient(AgentClient):
    """A client of /api/chat."""

    limit = ("options", "num_predict")

    def read(self, response: httpx.Response) -> Answer:
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert not any("error" in line for line in lines) and lines[-1]["done"]
        messages = [line["message"] for line in lines]
        text = "".join(message["content"] for message in messages)
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        turn: dict[str, Any] = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
        return Answer(turn, text, calls, lines[-1]["prompt_eval_count"], lines[-1].get("cached_tokens", 0))


class Cline(OllamaClient):
    """It gives calls ids of its own, and sends them back with the results."""

    name = "cline_ollama"

    def replay(self, answer: Answer, text: str) -> None:
        ids = [f"call_{len(self.body['messages'])}_{i}" for i in range(len(answer.calls))]
        calls = [
            {"id": i, "type": "function", "function": c["function"]} for i, c in zip(ids, answer.calls, strict=True)
        ]
        turns = [answer.parts | ({"tool_calls": calls} if calls else {})]
        turns += [
            {"role": "tool", "tool_call_id": c["id"], "tool_name": c["function"]["name"], "content": RESULT}
            for c in calls
        ]
        turns += [] if calls else [{"role": "user", "content": text}]
        self.body = self.body | {"messages": self.body["messages"] + turns}


class Continue(OllamaClient):
    """Its results name no call. It has tools only where the last turn is the user's."""

    name = "continue_ollama"

    def replay(self, answer: Answer, text: str) -> None:
        turns = [answer.parts]
        turns += [{"role": "tool", "content": RESULT} for _ in answer.calls]
        turns += [] if answer.calls else [{"role": "user", "content": text}]
        tools = {} if answer.calls else {"tools": self.recorded["body"]["tools"]}
        body = {name: value for name, value in self.body.items() if name != "tools"}
        self.body = body | tools | {"messages": self.body["messages"] + turns}


CLIENTS: tuple[type[AgentClient], ...] = (OpenCode, OpenWebUi, Aider, Codex, ClaudeCode, Cline, Continue)
