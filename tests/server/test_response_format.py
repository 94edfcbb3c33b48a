"""`response_format` and `text.format`: answers have the requested form, and equal those of `generate`."""

from __future__ import annotations

import json
import re
from asyncio import gather, run
from threading import current_thread
from time import perf_counter
from typing import Any

import jsonschema
import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, events, good, hang_up, refused
from triforce.interface.grammar import Grammar
from triforce.llm import LLM
from triforce.server.request_base import UNSUPPORTED_FIELDS
from triforce.structured_output import compiler
from triforce.structured_output import compiler as structured_output_compiler

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
SAMPLED = {"temperature": 0.8, "seed": 5, "top_k": 12}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"cat": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["cat", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}
TALK = [{"role": "user", "content": "the cat?"}]


def expected_output(llm: LLM, grammar: Grammar, prompt: Any, chat: bool = False) -> str:
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 5, "top_k": 12, "max_tokens": 200}
    params = llm.sampling_params(chat=chat, **fields, grammar=grammar)
    return llm.generate(prompt, params, mode="ar")[0].outputs[0].text


def chatted(llm: LLM) -> list[int]:
    assert llm.tokenizer
    return llm.tokenizer.chat(TALK)


def test_chat_keeps_to_json_schema(app: ASGIApp, llm: LLM) -> None:
    body = {"messages": TALK, **SAMPLED, "max_tokens": 200, "response_format": FORMAT}
    (choice,) = good(ask(app, CHAT, body))["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == expected_output(llm, Grammar.json(SCHEMA), chatted(llm), chat=True)
    streamed = events(ask(app, CHAT, body | {"stream": True}))
    deltas = [c["delta"].get("content", "") for chunk in streamed for c in chunk["choices"]]
    assert "".join(deltas) == choice["message"]["content"]


def test_responses_keep_to_json_schema(app: ASGIApp, llm: LLM) -> None:
    form = {"type": "json_schema", "name": "cat", "schema": SCHEMA, "strict": True}
    body = {"input": "the cat?", **SAMPLED, "max_output_tokens": 200, "text": {"format": form}}
    answer = good(ask(app, RESPONSES, body))
    assert answer["status"] == "completed" and answer["text"] == {"format": form}
    assert answer["output"][0]["content"][0]["text"] == expected_output(
        llm, Grammar.json(SCHEMA), chatted(llm), chat=True
    )


@pytest.mark.parametrize("mode", ["ar", "triforce", "ngram"])
def test_completions_keep_to_every_format_in_every_mode(app: ASGIApp, llm: LLM, mode: str) -> None:
    pattern = "(the |cat ){3}[0-9]{2}"
    for form, grammar in (
        (FORMAT, Grammar.json(SCHEMA)),
        ({"type": "regex", "regex": pattern}, Grammar.regex(pattern)),
        ({"type": "grammar", "grammar": 'start: "a" ("b" | "c")~3..4'}, Grammar.lark('start: "a" ("b" | "c")~3..4')),
    ):
        body = {"prompt": "the cat", **SAMPLED, "max_tokens": 200, "response_format": form, "mode": mode}
        (choice,) = good(ask(app, COMPLETIONS, body))["choices"]
        assert choice["text"] == expected_output(llm, grammar, "the cat") and choice["finish_reason"] == "stop"
    assert re.fullmatch("a[bc]{3,4}", choice["text"])


def test_json_object_starts_with_brace(app: ASGIApp) -> None:
    body = {"messages": TALK, **SAMPLED, "max_tokens": 20, "response_format": {"type": "json_object"}}
    assert good(ask(app, CHAT, body))["choices"][0]["message"]["content"].startswith("{")


def test_bad_format_is_refused_before_queue(app: ASGIApp) -> None:
    bad = FORMAT | {"json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
    for path, body in (
        (CHAT, {"messages": TALK, "response_format": bad, "stream": True}),
        (COMPLETIONS, {"prompt": "x", "response_format": bad}),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}),
    ):
        assert "uniqueItems" in refused(ask(app, path, body))
    assert UNSUPPORTED_FIELDS["text"][1] in refused(ask(app, CHAT, {"messages": TALK, "text": {"format": FORMAT}}))


def test_grammar_is_compiled_once_and_travels_with_request(app: ASGIApp, llm: LLM, monkeypatch: Any) -> None:
    """The engine's thread compiles nothing, even where a grammar is no longer kept when its turn comes."""
    threads = []
    monkeypatch.setattr(compiler, "CACHED_GRAMMARS", 0)
    monkeypatch.setattr(
        structured_output_compiler, "new_matcher", lambda *asked: threads.append(current_thread().name) or plain(*asked)
    )
    body = {"prompt": "x", "max_tokens": 4, "n": 3, "response_format": {"type": "regex", "regex": "(the |cat ){9}b"}}
    good(ask(app, COMPLETIONS, body))
    assert len(threads) == 1 and "triforce-worker" not in threads[0]


plain = structured_output_compiler.new_matcher


def test_grammar_trial_ends_with_its_client(app: ASGIApp) -> None:
    """The trial compilation of a slow grammar ends with its client, and does not delay the next request."""
    slow = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}}
    form = {"type": "json_schema", "json_schema": {"schema": slow}}

    async def leave() -> float:
        asked = [hang_up(app, COMPLETIONS, {"prompt": "x", "response_format": form}, after=0) for _ in range(4)]
        began = perf_counter()
        await gather(*asked)
        return perf_counter() - began

    assert run(leave()) < 4
