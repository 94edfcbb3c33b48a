"""Tool calls: required calls follow their parameters' schema, and optional calls are found in the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, events, good, refused
from tests.helpers.templated_app import templated_app
from triforce.server.answers.call_format import CallableFunction, JsonCallFormat
from triforce.server.answers.families import call_format
from triforce.server.answers.llama import LlamaFormat
from triforce.server.answers.marks import Marks
from triforce.server.answers.qwen import QwenFormat
from triforce.structured_output.compiler import Vocabulary, new_matcher

CHAT = "/v1/chat/completions"
TURNS = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}</s>{% endfor %}"
)
CALLS = {
    "qwen": """<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>""",
    "llama": """{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{# ipython #}""",
}
SIZE = {
    "type": "object",
    "properties": {"of": {"enum": ["cat", "hat"]}, "cm": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["of", "cm"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "size", "description": "measures", "parameters": SIZE}},
    {"type": "function", "function": {"name": "purr"}},
]
BODY = {"messages": [{"role": "user", "content": "the cat?"}], "tools": TOOLS, "max_tokens": 300, "seed": 2, "top_k": 9}


def writing(form: str, pair: Path) -> Iterator[ASGIApp]:
    """Yield the server of a model that writes calls in the form."""
    yield from templated_app(pair, TURNS.replace("CALL", CALLS[form]))


@pytest.fixture(scope="module", params=CALLS)
def app(request: pytest.FixtureRequest, pair: Path) -> Iterator[ASGIApp]:
    yield from writing(request.param, pair)


def checked(call: dict[str, Any]) -> str:
    """Check a call's arguments, and return its name."""
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    assert call["type"] == "function" and call["id"].startswith("call_")
    jsonschema.validate(arguments, SIZE if name == "size" else {"maxProperties": 0})
    return str(name)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "size"}}])
def test_required_tool_calls_validate(app: ASGIApp, choice: Any) -> None:
    found = 0
    for seed in range(4):
        body = BODY | {"tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        whole = good(ask(app, CHAT, body))
        ChatCompletion.model_validate(whole, strict=True)
        (answer,) = whole["choices"]
        if answer["finish_reason"] == "length":
            continue
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        assert checked(call) == "size" or choice == "required"
        found += 1
    assert found >= 3


def test_tool_calls_stream_equals_whole(app: ASGIApp) -> None:
    body = BODY | {"tool_choice": "required", "seed": 3, "n": 2}
    whole = good(ask(app, CHAT, body))["choices"]
    streamed = events(ask(app, CHAT, body | {"stream": True}))
    assert [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in streamed]
    chunks = [c for chunk in streamed for c in chunk["choices"]]
    for answer in whole:
        mine = [c for c in chunks if c["index"] == answer["index"]]
        calls = [call for c in mine for call in c["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        told = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        assert told == [
            (call["function"]["name"], call["function"]["arguments"])
            for call in answer["message"].get("tool_calls", [])
        ]
        assert mine[-1]["finish_reason"] == answer["finish_reason"]
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == (answer["message"]["content"] or "")


def test_tool_calls_equal_in_every_mode(app: ASGIApp) -> None:
    answers = []
    for mode in ("ar", "triforce", "ngram"):
        (answer,) = good(ask(app, CHAT, BODY | {"tool_choice": "required", "mode": mode}))["choices"]
        answers.append([call["function"] for call in answer["message"]["tool_calls"]])
    assert answers[0] and answers[0] == answers[1] == answers[2]


def test_tool_calls_and_outputs_become_turns(app: ASGIApp) -> None:
    function = {"name": "size", "arguments": '{"of": "cat", "cm": 30}'}
    turns = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "30 cm"},
    ]
    body = BODY | {"messages": [*BODY["messages"], *turns], "max_tokens": 4}  # type: ignore[misc]
    (answer,) = good(ask(app, CHAT, body))["choices"]
    assert "tool_calls" not in answer["message"] and answer["finish_reason"] == "length"
    for arguments in ("[]", "", " ", '{"value": '):  # as models wrote them: the conversation goes on
        turns[0]["tool_calls"][0]["function"]["arguments"] = arguments  # type: ignore[index]
        assert good(ask(app, CHAT, body | {"messages": turns}))["choices"]


def test_tools_unused_change_nothing(app: ASGIApp) -> None:
    """The choice `none` leaves the tools out of the prompt."""
    free = {key: value for key, value in BODY.items() if key != "tools"} | {"max_tokens": 8}
    plain, none = (good(ask(app, CHAT, body)) for body in (free, free | {"tools": TOOLS, "tool_choice": "none"}))
    assert plain["choices"] == none["choices"] and plain["usage"] == none["usage"]


def nested(depth: int) -> list[dict[str, Any]]:
    """Return a tool whose parameters are nested `depth` levels deep."""
    parameters = json.loads('{"items": ' * depth + "{}" + "}" * depth)
    return [{"type": "function", "function": {"name": "deep", "parameters": parameters}}]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("depth", [60, 150, 300, 800])
def test_tools_deep_parameters_break_nothing(app: ASGIApp, depth: int, choice: str) -> None:
    answer = ask(app, CHAT, BODY | {"tools": nested(depth), "tool_choice": choice, "max_tokens": 2})
    assert answer.status_code in ((200,) if depth == 60 else (200, 400) if choice == "auto" else (400,)), answer.text


@pytest.mark.parametrize("form", [QwenFormat(), LlamaFormat()])
@pytest.mark.parametrize(
    "parameters",
    [
        {"description": "any"},
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}}},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"enum": ["x", {}]},
    ],
)
def test_forced_arguments_are_an_object_whatever_else_a_schema_takes(
    form: JsonCallFormat, parameters: dict[str, Any]
) -> None:
    grammar = form.grammar(Marks(), [CallableFunction("f", "tools.0.parameters", parameters)], several=False)
    letters: Any = Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], [256], 256)
    matcher = new_matcher(LLTokenizer(letters, slices=[]), grammar.kind, grammar.source)
    for arguments, taken in (("{}", True), ("[]", False), ("5", False), ('"x"', False), ("null", False)):
        text = f'{{"name": "f", "{form.arguments_key}": {arguments}}}'
        text = f"<tool_call>\n{text}\n</tool_call>" if isinstance(form, QwenFormat) else text
        ids = list(text.encode())
        text_matcher = matcher.deep_copy()
        assert (text_matcher.try_consume_tokens(ids) == len(ids) and text_matcher.is_accepting()) is taken, arguments


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "bark"}}}, "'bark'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "the same name"),
        ({"tools": [TOOLS[1]] * 513}, "at most 512"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, "cannot be combined with tools"),
        ({"tools": [TOOLS[1], {"type": "Web Search"}]}, "tools.1"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
        ]}, "uniqueItems"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"enum": [{"a": 2**53 + 1}]}}}
        ]}, "the parameters of f cannot be enforced: the integer 9007199254740993 would be rounded"),
    ],
)  # fmt: skip
def test_tools_impossible_requests_are_400(app: ASGIApp, changes: dict[str, Any], says: str) -> None:
    assert says in refused(ask(app, CHAT, BODY | changes))


def test_tool_call_format_is_detected_from_template() -> None:
    assert isinstance(call_format(TURNS.replace("CALL", CALLS["qwen"])), QwenFormat)
    assert isinstance(call_format(TURNS.replace("CALL", CALLS["llama"])), LlamaFormat)
    assert call_format(TURNS) is None and isinstance(call_format("{{ messages }}"), QwenFormat)  # told in text
