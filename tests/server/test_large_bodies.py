"""Bodies that are parsed apart: their values are counted in reading, and answers equal those of small bodies."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good, refused
from triforce.server import json_reader
from triforce.server.limits import LARGE_INPUT, MAX_CONTAINERS, MAX_VALUES

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = 'a, [b] {c} \\ "d" ' * (LARGE_INPUT // 16)
"""Longer than what is parsed at once, and full of what looks like more values."""


def outcome(body: bytes | str, containers: int = 1000, values: int = 1000) -> tuple[str, Any]:
    return json_reader.parse(body.encode() if isinstance(body, str) else body, (containers, values))


def test_reader_values_equal_those_of_json() -> None:
    chance = random.Random(5)

    def value(depth: int) -> Any:
        kind = chance.randrange(6 if depth else 4)
        if kind == 5:
            return {chance.choice(['a"', "\\", "é,", "[{"]): value(depth - 1) for _ in range(chance.randrange(4))}
        if kind == 4:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        return [None, -1.5, '",[\\"{\n\\', "東\ud800"][kind]

    for _ in range(200):
        written = value(4)
        for text in (json.dumps(written), json.dumps(written, ensure_ascii=False).replace("\ud800", "")):
            assert outcome(text) == ("value", json.loads(text))
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        assert outcome('{"a": [1, "é"]}'.encode(encoding)) == ("value", {"a": [1, "é"]})


@pytest.mark.parametrize(("body", "told"), [
    ("[" * 1001 + "]" * 1001, "containers"),
    ("[" + "{}," * 1001 + "{}]", "containers"),
    ("[" + "1," * 1001 + "1]", "values"),
    ('[" \\", ' + '\\"' * 9 + '",' + "1," * 1001 + "1]", "values"),
    ('{"a": "' + "[,{" * 9999, "syntax"),
    ('{"a": "' + '\\"' * 9999, "syntax"),
    ('{"a": "' + "\\", "syntax"),
    ("[1,", "syntax"),
    (b'["\xff"]', "encoding"),
    (b"\x1f\x8b" + b"x" * 2000, "compressed"),
    ("[" + "9" * 5000 + "]", "unreadable"),
])  # fmt: skip
def test_reader_counts_before_it_makes_objects(body: bytes | str, told: str) -> None:
    assert outcome(body)[0] == told


def test_large_body_is_answered_as_small_one(app: ASGIApp) -> None:
    body = {"prompt": "the cat", "max_tokens": 4, "seed": 3}
    plain, large = (good(ask(app, PATH, body | more))["choices"] for more in ({}, {"user": LONG}))
    assert plain == large


def test_large_body_errors_name_their_cause(app: ASGIApp) -> None:
    padding = {"prompt": "a", "user": LONG}
    assert "is not JSON: " in refused(ask(app, PATH, content=json.dumps(padding)[:-1], headers=JSON))
    latin = b"\xff" * (LARGE_INPUT + 1)
    assert "is not JSON: the byte at offset 0" in refused(ask(app, PATH, content=latin, headers=JSON))
    assert f"at most {MAX_VALUES:,}" in refused(ask(app, PATH, {"prompt": [5] * (MAX_VALUES + 1)}))
    lists: Any = [[]] * (MAX_CONTAINERS + 1)
    assert f"at most {MAX_CONTAINERS:,}" in refused(ask(app, PATH, padding | {"metadata": lists}))
    assert refused(ask(app, PATH, content=json.dumps(padding), headers={"content-type": "text/plain"}))
    assert "nosuch" in refused(ask(app, PATH, padding | {"nosuch": 1}))


JSON = {"content-type": "application/json"}
TURNS = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(("path", "field", "value", "most"), [
    (PATH, "stop_token_ids", [7] * 1025, 1024),
    (PATH, "stop", ["a"] * 17, 16),
    (PATH, "prompt", [[5]] * 65, 64),
    (PATH, "prompt", ["a"] * 65, 64),
    (PATH, "logit_bias", {str(i): 1 for i in range(1025)}, 1024),
    (CHAT, "messages", [{"role": "user", "content": "a"}] * 4097, 4096),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}], 1024),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}] * 513, 512),
    ("/v1/responses", "input", [{"role": "user", "content": "a"}] * 4097, 4096),
])  # fmt: skip
def test_lists_beyond_their_bound_are_refused_with_it(
    app: ASGIApp, path: str, field: str, value: Any, most: int
) -> None:
    body: dict[str, Any] = {PATH: {"prompt": "a"}, CHAT: {"messages": TURNS}}.get(path, {})
    assert f"at most {most} are taken; send fewer" in refused(ask(app, path, body | {field: value}))


def test_call_arguments_and_schemas_are_bounded(app: ASGIApp) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "[" * (LARGE_INPUT + 1)}}
    turn = {"role": "assistant", "tool_calls": [call]}
    assert "messages.0.tool_calls.0.function.arguments" in refused(ask(app, CHAT, {"messages": [turn]}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": list(range(10_000))}}}
    assert "too many parts" in refused(ask(app, CHAT, {"messages": TURNS, "tools": [tool]}))


def test_echo_beyond_its_bound_is_refused(app: ASGIApp) -> None:
    echo = {"prompt": [[5] * 1000] * 13, "echo": True, "logprobs": 19, "max_tokens": 0}
    assert "the maximum is 262144" in refused(ask(app, PATH, echo | {"n": 2}))
