"""Invalid requests are refused in OpenAI's error shape with advice; no request breaks the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good, refused
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.request_base import UNSUPPORTED_FIELDS

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "the cat"},
    CHAT: {"messages": [{"role": "user", "content": "the cat"}]},
    RESPONSES: {"input": "the cat"},
    "/tokenize": {"prompt": "the cat"},
    "/detokenize": {"tokens": [5, 6]},
}
SHORT = {COMPLETIONS: "max_tokens", CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}
JSON = {"content-type": "application/json"}
PICTURE = {"type": "image_url", "image_url": {}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1, 300]}, "vocabulary"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": 5}, "valid string, or"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5] * 3000}, "Shorten"),
        ({"prompt": "a" * 70_000}, "Shorten"),
        ({"prompt": ["a"] * 65}, "at most 64"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p must be"),
        ({"seed": -2}, "seed must be"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens must be"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n must be"),
        ({"n": 17}, "from 1 to 16"),
        ({"n": 10**400}, "n"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"stop": ["x"] * 17}, "at most 16"),
        ({"stop": ["x" * 1001]}, "shorten"),
        ({"stop": [""]}, "stop must be"),
        ({"logit_bias": {"x": 1}}, "token id"),
        ({"logit_bias": {"900": 1}}, "vocabulary"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024"),
        ({"mode": "fast"}, "choose from"),
        ({"stream_options": {"include_usage": True}}, "stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown field"),
        ({"surprise": 1}, "unknown field"),
        ({"\ud800": 1}, "unknown field"),
        ({"best_of": 4}, "n gives"),
        ({"suffix": "end"}, "leave it out"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not"),
        ({"response_format": {"type": "regex", "regex": "a" * 65_537}}, "too long"),
        ({"response_format": {"type": "grammar", "grammar": "start: nowhere"}}, "nowhere"),
    ],
)
def test_bad_completions_are_400(app: ASGIApp, changes: dict[str, Any], says: str) -> None:
    body = json.dumps({"prompt": "the cat", "max_tokens": 2} | changes)
    assert says in refused(ask(app, COMPLETIONS, content=body, headers=JSON))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "stranger", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "required"),
        ({"messages": [{"role": "user", "content": "x" * 70_000}]}, "Shorten"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0] is 'image_url'",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"functions": [{"name": "f"}]}, "use tools and tool_choice"),
        ({"top_logprobs": 3}, "logprobs: true"),
    ],
)
def test_bad_chats_are_400(app: ASGIApp, changes: dict[str, Any], says: str) -> None:
    assert says in refused(ask(app, CHAT, GOOD[CHAT] | {"max_completion_tokens": 2} | changes))


@pytest.mark.parametrize("field", ["previous_response_id", "background"])
def test_responses_stored_state_is_refused(app: ASGIApp, field: str) -> None:
    assert UNSUPPORTED_FIELDS[field][1] in refused(ask(app, RESPONSES, GOOD[RESPONSES] | {field: True}))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_ignored_client_fields_are_accepted_and_named(app: ASGIApp, path: str, stream: bool) -> None:
    wishes = {"reasoning": {"effort": "low"}, "reasoning_effort": "high", "verbosity": "low", "store": True}
    plain = GOOD[path] | {"stream": stream}
    answer = ask(app, path, plain | wishes | {"include": [], "user": "me"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Triforce-Ignored"] == "reasoning, reasoning_effort, store, verbosity"
    assert "X-Triforce-Ignored" not in ask(app, path, plain).headers


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_FIELDS))
def test_neutral_values_are_accepted(app: ASGIApp, field: str) -> None:
    body = GOOD[CHAT] | {"max_completion_tokens": 1, field: [None, *UNSUPPORTED_FIELDS[field][0]][-1], "user": "me"}
    if field == "top_logprobs":
        body |= {"logprobs": True}
    assert ask(app, CHAT, body).status_code == 200


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"5", b"null", b'"x"', b'{"prompt": "\xff"}', b"\xff\xfe", b'{"prompt": "\\ud800"}'),
        *(b"[" * 100_000, b'{"prompt":' * 50_000, b'{"n": ' + b"9" * 10_000 + b"}", b'{"prompt": NaN}'),
    ],
    ids=lambda content: content[:12],
)
def test_malformed_bodies_are_400(app: ASGIApp, path: str, content: bytes) -> None:
    refused(ask(app, path, content=content, headers=JSON))


@pytest.mark.parametrize("size", [3_000, 200_000], ids=["tokens", "characters"])
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "prompt", lambda text: text),
        ("/v1/completions", "prompt", lambda text: ["the cat", text]),
        ("/v1/completions", "prompt", lambda text: [5] * len(text)),
        ("/v1/chat/completions", "messages", lambda text: [{"role": "user", "content": text}]),
        ("/v1/responses", "input", lambda text: text),
    ],
)
def test_prompt_beyond_the_context_has_openai_code(
    app: ASGIApp, path: str, field: str, body: Callable[[str], Any], size: int
) -> None:
    response = ask(app, path, {field: body("x " * size)})
    assert "context of 2048" in refused(response)
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("context_length_exceeded", field)


def test_non_json_content_types_are_400(app: ASGIApp) -> None:
    """A page of another site cannot post a form to this server."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        body = json.dumps(GOOD[COMPLETIONS])
        assert "application/json" in refused(ask(app, COMPLETIONS, content=body, headers={"content-type": kind}))


def test_unknown_routes_are_404_and_405(app: ASGIApp) -> None:
    assert "openapi.json" in refused(ask(app, "/v2"), 404)
    assert "openapi.json" in refused(ask(app, COMPLETIONS), 405)
    assert "'tiny'" in refused(ask(app, "/v1/models/gpt/5"), 404)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["prompt", "messages", "input", "tokens", "n", "stop", "seed", "logprobs", "logit_bias", "stream", "echo"]
FIELDS += ["temperature", "top_p", "top_k", "mode", "stream_options", "add_special_tokens", "instructions", "tools"]
FIELDS += ["response_format", "text", "tool_choice"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(GOOD)), st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, max_size=3)
)
def test_random_bodies_get_no_5xx(app: ASGIApp, path: str, changes: dict[str, Any]) -> None:
    body = GOOD[path] | ({SHORT[path]: 1} if path in SHORT else {}) | changes
    response = ask(app, path, content=json.dumps(body), headers=JSON)
    assert response.status_code in (200, 400, 404), response.text


def test_openapi_describes_the_routes(app: ASGIApp) -> None:
    api = good(ask(app, "/openapi.json"))
    for path in GOOD:
        operation = api["paths"][path]["post"]
        assert operation["responses"].keys() == {"200", "4XX"} and operation["description"]
    assert api["components"]["schemas"]["CompletionBody"]["additionalProperties"] is False


def test_valid_requests_beside_mistakes_are_served(app: ASGIApp) -> None:
    """Valid requests beside the invalid ones above are served."""
    for path, body in GOOD.items():
        few_fields = {SHORT[path]: 2, "temperature": 0.8, "seed": 0} if path in SHORT else {}
        assert ask(app, path, body | few_fields).status_code == 200
    largest_fields = {"n": 16, "logprobs": 20, "stop": ["x" * 1000] * 16, "max_tokens": 1, "prompt": [5] * 9}
    assert len(good(ask(app, COMPLETIONS, largest_fields | {"logit_bias": {"5": -1}}))["choices"]) == 16


def test_mode_that_needs_a_draft_says_so(pair: Path) -> None:
    llm = LLM(pair / "target", None)
    app = create_app(llm, Worker(llm, Limits(waiting=1)), "tiny")
    message = refused(ask(app, COMPLETIONS, {"prompt": "the cat", "mode": "draft"}))
    assert "mode 'draft' needs a draft model" in message and "choose from ar" in message
    asyncio.run(app.state.service.engine.close())
