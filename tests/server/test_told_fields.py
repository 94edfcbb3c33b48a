"""Every field and every header of an answer stands in docs/reference/http.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, events, good
from tests.helpers.pages import ROOT

NAMES = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", (ROOT / "docs/reference/http.md").read_text()))))
"""Words that the page writes as code."""
BY_TEXT = "top_logprobs"
"""The field of completions whose objects have texts of tokens as keys."""
REPORTED = {"tier_stats": True, "max_tokens": 4, "ignore_eos": True}
STREAMED = {"stream": True, "trace": True, "return_progress": True, "stream_options": {"include_usage": True}}
CHAT = {"messages": [{"role": "user", "content": "the cat"}]}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the cat", "logprobs": 1, "echo": True, **REPORTED},
    "/v1/chat/completions": {**CHAT, "logprobs": True, "top_logprobs": 1, **REPORTED},
    "/v1/responses": {"input": "the cat", "tier_stats": True, "max_output_tokens": 4},
    "/tokenize": {"prompt": "the cat", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
}


def names_of(answer: Any, field: str = "") -> Iterator[str]:
    """Yield the names of all fields of an answer. field: the name of the field that holds it."""
    if isinstance(answer, list):
        for part in answer:
            yield from names_of(part, field)
    elif isinstance(answer, dict):
        for name, part in answer.items():
            if field != BY_TEXT or isinstance(part, list):
                yield name
            yield from names_of(part, name)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/documents"])
def test_fields_of_get_are_told(app: ASGIApp, path: str) -> None:
    assert set(names_of(good(ask(app, path)))) - NAMES == set()


@pytest.mark.parametrize("path", ANSWERS)
def test_fields_of_whole_answer_are_told(app: ASGIApp, path: str) -> None:
    response = ask(app, path, ANSWERS[path])
    told = {name.lower() for name in NAMES}
    assert set(names_of(good(response))) - NAMES == set()
    assert {part for name in response.headers for part in name.split("-")} - {"length"} - told == set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_fields_of_stream_are_told(app: ASGIApp, path: str) -> None:
    options = {"stream": True} if path == "/v1/responses" else STREAMED
    body = {name: value for name, value in ANSWERS[path].items() if name not in ("echo", "logprobs", "top_logprobs")}
    chunks = events(ask(app, path, body | options))
    assert len(chunks) > 3 and {name for chunk in chunks for name in names_of(chunk)} - NAMES == set()


def test_untold_field_is_found() -> None:
    answer = {"choices": [{"secret_field": 1}], BY_TEXT: [{"a text": -1.0}]}
    assert set(names_of(answer)) - NAMES == {"secret_field"}
