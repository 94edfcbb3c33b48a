"""Every refusal has the shape of its door: from the layers in front of it, from its body, and from the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good, told_refusal
from tests.helpers.guarded_app import KEY
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits
from triforce.server.request_base import HEADER

TURNS = [{"role": "user", "content": "the cat"}]
DOORS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/api/chat": lambda text: {"messages": [{"role": "user", "content": text}], "options": {"num_predict": 2}},
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": 2}},
}
LONG = "x " * 3000


@pytest.mark.parametrize("path", DOORS)
def test_refusals_of_layers_have_shape_of_door(guarded: ASGIApp, path: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    body = DOORS[path]("the cat")
    for status, word, answer in (
        (401, "a key is needed", ask(guarded, path, body)),
        (401, "not known here", ask(guarded, path, body, headers={"x-api-key": "another-key-of-many-letters"})),
        (413, "--max-body", ask(guarded, path, DOORS[path]("x" * 3000), headers=key)),
        (400, "--allowed-host", ask(guarded, path, body, headers=key | {"host": "elsewhere.org"})),
        (405, "POST", ask(guarded, path, headers=key)),
        (404, "openapi.json", ask(guarded, f"{path}/x", body, headers=key)),
        (400, "JSON", ask(guarded, path, content=b"{", headers=key | {"content-type": "application/json"})),
    ):
        assert answer.status_code == status and word in told_refusal(answer)[0], answer.text
    assert ask(guarded, path, body, headers={"x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize("path", DOORS)
def test_refusals_of_bodies_have_shape_of_door(app: ASGIApp, path: str) -> None:
    for body in ({}, DOORS[path](5), DOORS[path]("the cat") | {"mode": "fast"}):
        answer = ask(app, path, body)
        if (path == "/api/chat" and not body) or (path == "/api/generate" and not body):
            assert good(answer)["done_reason"] == "load"
        elif path != "/v1/messages/count_tokens" or "mode" not in body:
            assert answer.status_code == 400 and told_refusal(answer)[0], answer.text


@pytest.mark.parametrize("path", [path for path in DOORS if "count" not in path])
def test_prompt_beyond_the_context_is_told_in_words_of_the_door(app: ASGIApp, path: str) -> None:
    answer = ask(app, path, DOORS[path](LONG))
    message, _ = told_refusal(answer)
    assert answer.status_code == 400 and "context of 2048" in message
    if path == "/v1/messages":  # by which Claude Code knows it
        assert message.startswith("prompt is too long")


@pytest.mark.parametrize("path", [path for path in DOORS if "count" not in path])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_engine_have_shape_of_door(llm: LLM, path: str, stream: bool) -> None:
    """A server that stops refuses with 503."""
    app = create_app(llm, engine := Worker(llm, Limits(waiting=1)), "tiny")
    asyncio.run(engine.close())
    answer = ask(app, path, DOORS[path]("the cat") | {"stream": stream})
    assert answer.status_code == 503 and "stopping" in told_refusal(answer)[0]


@pytest.mark.parametrize(
    ("path", "changes", "ignored"),
    [
        ("/v1/messages", {"model": "claude-opus-9"}, "model"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking, thinking.budget_tokens"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, "thinking"),
        ("/v1/messages", {"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
        ("/v1/messages", {"context_management": {"edits": []}, "metadata": {"user_id": "x"}}, "context_management"),
        ("/v1/messages", {"output_config": {"effort": "high", "task_budget": 5}},
         "output_config.effort, output_config.task_budget"),
        ("/v1/messages", {"temperature": None, "stop_sequences": None, "system": None}, None),
        ("/v1/messages", {"n": 3, "response_format": {"type": "json_object"}}, "n, response_format"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}],
                          "tool_choice": {"type": "tool", "name": "web_search"}},
         "tool_choice, tools.web_search_20250305"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages.content.image"),
        ("/api/chat", {"model": "qwen3:latest", "keep_alive": 0, "think": True}, "model, think"),
        ("/api/chat", {"model": "tiny:latest"}, None),
        ("/api/chat", {"options": {"num_ctx": 32768, "num_predict": 2, "mirostat": 1}},
         "options.mirostat, options.num_ctx"),
        ("/api/chat", {"tool_choice": "auto", "top_p": 1.0, "max_output_tokens": 8}, "tool_choice"),
        ("/api/chat", {"messages": [{"role": "user", "content": "the cat", "images": ["AAAA"]}]}, "messages.images"),
        ("/api/generate", {"context": [1, 2], "template": "x"}, "context, template"),
        ("/v1/responses", {"client_metadata": {"x": "y"}, "include": ["reasoning.encrypted_content"]},
         "client_metadata, include"),
        ("/v1/responses", {"tools": [{"type": "web_search"}, {"type": "image_generation"}]},
         "tools.image_generation, tools.web_search"),
        ("/v1/responses", {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "tool_search"}]}]},
         "tools.tools.tool_search"),
        ("/v1/responses", {"input": [{"type": "web_search_call", "id": "x"}, *TURNS]},
         "input.id, input.web_search_call"),
    ],
)  # fmt: skip
def test_fields_of_clients_are_ignored_and_told(
    app: ASGIApp, path: str, changes: dict[str, Any], ignored: str | None
) -> None:
    answer = ask(app, path, DOORS[path]("the cat") | {"stream": False} | changes)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER) == ignored


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ("/v1/messages", {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
        ("/v1/messages", {"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, "needs a name"),
        ("/v1/messages", {"temperature": "hot"}, "temperature"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ("/v1/messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ("/api/chat", {"options": {"temperature": -1}}, "temperature"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"messages": [{"role": "thinking", "content": "x"}]}, "no text"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
    ],
)
def test_mistakes_are_refused(app: ASGIApp, path: str, changes: dict[str, Any], says: str) -> None:
    answer = ask(app, path, DOORS[path]("the cat") | changes)
    assert answer.status_code == 400 and says in told_refusal(answer)[0], answer.text


@pytest.mark.parametrize("raw", [True, False])
def test_prompt_of_ollama_keeps_format_and_mode(app: ASGIApp, raw: bool) -> None:
    """With the chat template and without it."""
    schema = {"enum": ["cat", "mat"]}
    body = {"prompt": "the cat", "raw": raw, "format": schema, "stream": False, "mode": "ngram"}
    answer = good(ask(app, "/api/generate", body))
    assert answer["response"] in ('"cat"', '"mat"') and answer["done_reason"] == "stop"
    assert ask(app, "/api/generate", body | {"mode": "fast"}).status_code == 400


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_programs_may_leave_out_content_type_of_ollama(app: ASGIApp, path: str) -> None:
    """As curl does. A page needs it: without it a browser would send the request to any server without asking."""
    content = json.dumps(DOORS[path]("the cat") | {"stream": False}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert good(ask(app, path, content=content, headers=form))["done"]
    for header in ({"origin": "https://example.org"}, {"sec-fetch-site": "cross-site"}):
        assert ask(app, path, content=content, headers=form | header).status_code in (400, 403)
    assert ask(app, "/v1/messages", content=content, headers=form).status_code == 400


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999"])
@pytest.mark.parametrize("path", [path for path in DOORS if path != "/api/generate"])
def test_numbers_that_json_cannot_hold_are_refused(app: ASGIApp, path: str, number: str) -> None:
    tools = '[{"type": "function", "name": "f", "parameters": {"maximum": NUMBER}}]'.replace("NUMBER", number)
    content = json.dumps(DOORS[path]("the cat"))[:-1] + f', "tools": {tools}}}'
    answer = ask(app, path, content=content.encode(), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "not JSON" in told_refusal(answer)[0]


def test_document_of_text_is_read(app: ASGIApp) -> None:
    documents = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the cat"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "the cat"}]}},
        {"type": "search_result", "source": "x", "title": "y", "content": [{"type": "text", "text": "the cat"}]},
        {"type": "text", "text": "the cat"},
    ]
    path = "/v1/messages/count_tokens"
    counts = {good(ask(app, path, {"messages": [{"role": "user", "content": [d]}]}))["input_tokens"] for d in documents}
    assert len(counts) == 1
