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
from triforce.server.answers.call_parser import CallParser
from triforce.server.answers.json_calls import JsonBlock
from triforce.server.answers.marks import Marks
from triforce.server.app import create_app
from triforce.server.doors.responses import Items
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
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
    one = {"type": "function", "function": {"name": "size"}}
    body = TALK | {"tool_choice": choice if isinstance(choice, str) else one, "parallel_tool_calls": False}
    (wanted,) = good(ask(app, CHAT, body))["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in wanted["message"]["tool_calls"]]
    assert calls and called(answer["output"]) == calls and answer["status"] == "completed"
    (item,) = answer["output"]
    assert item["call_id"].startswith("call_") and item["status"] == "completed"
    assert answer["tool_choice"] == choice and [tool["name"] for tool in answer["tools"]] == ["size", "purr"]
    assert not answer["parallel_tool_calls"] and not answer["store"]


def test_response_tools_stream_adds_up_to_whole(app: ASGIApp) -> None:
    body = BODY | {"tool_choice": "required", "tier_stats": True, "mode": "triforce"}
    whole = good(ask(app, RESPONSES, body))
    told = events(ask(app, RESPONSES, body | {"stream": True}))
    for event in told:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    last = told[-1]["response"]
    assert called(last["output"]) == called(whole["output"]) != []
    # What the tiers did may differ: which layers are searched is found on the way, and the first answer told of some.
    tiers_told, tiers_wanted = last["usage"].pop("tiers"), whole["usage"].pop("tiers")
    assert [tier["name"] for tier in tiers_told] == [tier["name"] for tier in tiers_wanted]
    assert tiers_told[-1]["proposed"] == tiers_wanted[-1]["proposed"]
    assert last["usage"] == whole["usage"]
    grown: dict[int, str] = {}
    for event in told:
        if event["type"] in ("response.function_call_arguments.delta", "response.output_text.delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    assert [grown[i] for i in range(len(last["output"]))] == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in last["output"]
    ]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    tiers = [tier for event in told for tier in event.get("token_tiers", [])]
    assert len(tiers) == last["usage"]["output_tokens"]


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
                first = await stream.get_final_response()
            assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
            calls = [item for item in first.output if item.type == "function_call"]
            talk += [*first.output, *({**RESULT, "call_id": call.call_id} for call in calls)]
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
    alone = good(ask(app, RESPONSES, BODY | {"input": [talk[0], *talk[2:]], "max_output_tokens": 6}))
    assert alone["usage"]["input_tokens"] < answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": {"type": "function", "name": "bark"}}, "'bark'"),
        ({"tools": [*FLAT, FLAT[0]]}, "the same name"),
        ({"tools": TOOLS}, "function: send its fields beside type"),
        ({"tools": [], "tool_choice": "required"}, "needs tools"),
        ({"text": {"format": {"type": "grammar", "grammar": 'start: "a"'}}}, "cannot be combined with tools"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input has no message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not kept"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "Field required"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"uniqueItems": True}}],
          "tool_choice": "required"}, "uniqueItems"),
        ({"previous_response_id": "resp_1"}, "are not stored"),
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
    assert llm.tokenizer
    llm.tokenizer.templates = {}
    engine = Worker(llm, Limits(waiting=1))
    for body in (BODY, {"input": [CALL, RESULT]}):
        assert "chat template" in refused(ask(create_app(llm, engine, "tiny"), RESPONSES, body))
    asyncio.run(engine.close())


def tagged_parser() -> CallParser:
    return CallParser({"<tool_call>": lambda: JsonBlock(Marks(), "<tool_call>", "</tool_call>")}, ["</tool_call>"])


@pytest.mark.parametrize("width", [1, 5, 1000])
def test_response_items_stream_in_order(width: int) -> None:
    """Each text and each call is an item, complete before the next item begins."""
    text = 'so: <tool_call>\n{"name": "size", "arguments": {"of": "cat"}}\n</tool_call> and <b'
    items = Items(tagged_parser(), {})
    open_at, told = None, []
    for i in range(0, len(text), width):
        told += [kind for kind, _ in _in_turn(items.add(text[i : i + width], is_final=i + width >= len(text)))]
    told += [kind for kind, _ in _in_turn(items.end("incomplete"))]
    for kind in told:
        if kind == "output_item.added":
            assert open_at is None
            open_at = kind
        open_at = None if kind == "output_item.done" else open_at
    assert open_at is None and told.count("output_item.done") == len(items.items) == 3
    said, call, more = items.items
    assert (said["content"][0]["text"], said["status"]) == ("so:", "completed")
    assert (json.loads(call["arguments"]), call["status"]) == ({"of": "cat"}, "completed")
    assert (more["content"][0]["text"].strip(), more["status"]) == ("and <b", "incomplete")


def _in_turn(told: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, data in told:
        yield kind, json.loads(json.dumps(data))


def test_response_empty_answer_is_message() -> None:
    items = Items(tagged_parser(), {})
    assert [kind for kind, _ in items.end("completed")][-1] == "output_item.done"
    (message,) = items.items
    assert message["content"][0]["text"] == "" and message["status"] == "completed"
