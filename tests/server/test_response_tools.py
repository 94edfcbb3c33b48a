"""Tools of /v1/responses: the calls that a chat makes, as items, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, events, good, refused
from tests.server.test_tool_calls import CALLS, TOOLS, nested, writing
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.responses import Items
from triforce.server.tools import QWEN

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
SAMPLED: dict[str, Any] = {"seed": 2, "top_k": 9}
BODY: dict[str, Any] = {"input": "the cat?", "tools": FLAT, "max_output_tokens": 300, **SAMPLED}
TALK = {"messages": [{"role": "user", "content": "the cat?"}], "tools": TOOLS, "max_tokens": 300, **SAMPLED}
CALL = {"type": "function_call", "call_id": "call_1", "name": "size", "arguments": '{"of": "cat", "cm": 30}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "30 cm"}


@pytest.fixture(scope="module", params=CALLS)
def app(request: pytest.FixtureRequest, pair: Path) -> Iterator[ASGIApp]:
    yield from writing(request.param, pair)


def called(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "size"}])
def test_response_calls_equal_chat_calls(app: ASGIApp, choice: Any) -> None:
    answer = good(ask(app, RESPONSES, BODY | {"tool_choice": choice, "parallel_tool_calls": False}))
    Response.model_validate(answer, strict=True)
    size_tool = {"type": "function", "function": {"name": "size"}}
    body = TALK | {"tool_choice": choice if isinstance(choice, str) else size_tool, "parallel_tool_calls": False}
    (chat_choice,) = good(ask(app, CHAT, body))["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in chat_choice["message"]["tool_calls"]]
    assert calls and called(answer["output"]) == calls and answer["status"] == "completed"
    (item,) = answer["output"]
    assert item["call_id"].startswith("call_") and item["status"] == "completed"
    assert answer["tool_choice"] == choice and [tool["name"] for tool in answer["tools"]] == ["size", "purr"]
    assert not answer["parallel_tool_calls"] and not answer["store"]


def test_response_tools_stream_adds_up_to_whole(app: ASGIApp) -> None:
    body = BODY | {"tool_choice": "required", "tier_stats": True, "mode": "triforce"}
    full_answer = good(ask(app, RESPONSES, body))
    stream_events = events(ask(app, RESPONSES, body | {"stream": True}))
    for event in stream_events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in stream_events] == list(range(len(stream_events)))
    final = stream_events[-1]["response"]
    assert called(final["output"]) == called(full_answer["output"]) != []
    # What the tiers did may differ: which layers are searched is found on the way, and the first answer told of some.
    tiers_told = final["usage"].pop("tiers")
    tiers_wanted = full_answer["usage"].pop("tiers")
    assert [tier["name"] for tier in tiers_told] == [tier["name"] for tier in tiers_wanted]
    assert tiers_told[-1]["proposed"] == tiers_wanted[-1]["proposed"]
    assert final["usage"] == full_answer["usage"]
    grown: dict[int, str] = {}
    for event in stream_events:
        if event["type"] in ("response.function_call_arguments.delta", "response.output_text.delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    assert [grown[i] for i in range(len(final["output"]))] == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in final["output"]
    ]
    done = [event["item"] for event in stream_events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    tiers = [tier for event in stream_events for tier in event.get("token_tiers", [])]
    assert len(tiers) == final["usage"]["output_tokens"]


def test_response_tools_openai_client_round_trip(app: ASGIApp) -> None:
    """Calls are answered by sending back the output, and what the functions gave, with what was asked."""

    async def go() -> None:
        transport = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(api_key="x", base_url="http://localhost/v1", http_client=transport) as client:
            asked: Any = {
                "model": "tiny",
                "tools": FLAT,
                "max_output_tokens": 300,
                "extra_body": SAMPLED,
                "parallel_tool_calls": False,
            }
            talk: list[Any] = [{"role": "user", "content": "the cat?"}]
            async with client.responses.stream(input=talk, tool_choice="required", **asked) as stream:
                kinds = [event.type async for event in stream]
                first_response = await stream.get_final_response()
            assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
            calls = [item for item in first_response.output if item.type == "function_call"]
            talk += [*first_response.output, *({**RESULT, "call_id": call.call_id} for call in calls)]
            second = await client.responses.create(input=talk, tool_choice="none", **asked | {"max_output_tokens": 4})
            assert calls and second.output_text is not None and second.status == "incomplete"

    asyncio.run(go())


def test_response_calls_and_outputs_become_turns(app: ASGIApp) -> None:
    """Calls join the assistant's turn before them."""
    again = CALL | {"call_id": "call_2", "name": "purr", "arguments": "{}", "id": "fc_1", "status": "completed"}
    talk: list[Any] = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "so:"}, CALL, again]
    talk += [RESULT, RESULT | {"call_id": "call_2", "output": [{"type": "input_text", "text": "rr"}]}]
    answer = good(ask(app, RESPONSES, BODY | {"input": talk, "max_output_tokens": 6}))
    calls = [{"id": c["call_id"], "function": {k: c[k] for k in ("name", "arguments")}} for c in (CALL, again)]
    turns = [*TALK["messages"], {"role": "assistant", "content": "so:", "tool_calls": calls}]  # type: ignore[misc]
    turns += [{"role": "tool", "tool_call_id": "call_1", "content": "30 cm"},
              {"role": "tool", "tool_call_id": "call_2", "content": "rr"}]  # fmt: skip
    chat = good(ask(app, CHAT, TALK | {"messages": turns, "max_tokens": 6}))
    assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    shorter = good(ask(app, RESPONSES, BODY | {"input": [talk[0], *talk[2:]], "max_output_tokens": 6}))
    assert shorter["usage"]["input_tokens"] < answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": {"type": "function", "name": "bark"}}, "'bark'"),
        ({"tools": [*FLAT, FLAT[0]]}, "one name"),
        ({"tools": TOOLS}, "function: its fields stand beside type here"),
        ({"tools": [{"type": "web_search"}]}, "none of them is a function"),
        ({"tools": [], "tool_choice": "required"}, "needs tools"),
        ({"text": {"format": {"type": "json_object"}}}, "held to text"),
        ({"input": [CALL | {"arguments": "[]"}]}, "no JSON object"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "function_call_output"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "Field required"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"uniqueItems": True}}],
          "tool_choice": "required"}, "uniqueItems"),
        ({"previous_response_id": "resp_1"}, "nothing is kept"),
    ],
)  # fmt: skip
def test_response_impossible_tools_are_400(app: ASGIApp, changes: dict[str, Any], says: str) -> None:
    assert says in refused(ask(app, RESPONSES, BODY | changes))


@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize(("depth", "status"), [(60, 200), (150, 400), (800, 400)])
def test_response_deep_tool_parameters_break_nothing(app: ASGIApp, depth: int, status: int, choice: str) -> None:
    (tool,) = nested(depth)
    body = BODY | {"tools": [{"type": "function", **tool["function"]}], "tool_choice": choice, "max_output_tokens": 2}
    answer = ask(app, RESPONSES, body)
    assert answer.status_code == status and (status == 200 or "nested too deeply" in refused(answer))


def test_response_tools_without_template_are_refused(pair: Path) -> None:
    llm = LLM(pair / "target")
    engine = Worker(llm, Limits(waiting=1))
    for body in (BODY, {"input": [CALL, RESULT]}):
        assert "chat template" in refused(ask(create_app(llm, engine, "tiny"), RESPONSES, body))
    asyncio.run(engine.close())


@pytest.mark.parametrize("width", [1, 5, 1000])
def test_response_items_stream_in_order(width: int) -> None:
    """Text, calls, and text again: each its own item, complete before the next one begins."""
    text = 'so: <tool_call>\n{"name": "size", "arguments": {"of": "cat"}}\n</tool_call> and <b'
    items = Items(QWEN.parser({"size"}))
    open_at = None
    kinds = []
    for i in range(0, len(text), width):
        kinds += [kind for kind, _ in _in_turn(items.add(text[i : i + width], last=i + width >= len(text)))]
    kinds += [kind for kind, _ in _in_turn(items.end("incomplete"))]
    for kind in kinds:
        if kind == "output_item.added":
            assert open_at is None
            open_at = kind
        open_at = None if kind == "output_item.done" else open_at
    assert open_at is None and kinds.count("output_item.done") == len(items.items) == 3
    message_item, call, more_items = items.items
    assert (message_item["content"][0]["text"], message_item["status"]) == ("so:", "completed")
    assert (json.loads(call["arguments"]), call["status"]) == ({"of": "cat"}, "completed")
    assert (more_items["content"][0]["text"].strip(), more_items["status"]) == ("and <b", "incomplete")


def _in_turn(stream_events: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, data in stream_events:
        yield kind, json.loads(json.dumps(data))


def test_response_empty_answer_is_message() -> None:
    items = Items(QWEN.parser({"size"}))
    assert [kind for kind, _ in items.end("completed")][-1] == "output_item.done"
    (message,) = items.items
    assert message["content"][0]["text"] == "" and message["status"] == "completed"
