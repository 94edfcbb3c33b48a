"""Everyday requests of people and clients, and the server's answers: tests/data/everyday/server.json.

A case is `sent` to a `path` of a `server`: `plain`, one that needs `keys`, or one whose template has `calls` of tools
and thinking. `says` stands in the message of an error, `param` is its field, `ignored` what the header names.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, events, good, told_refusal
from tests.helpers.templated_app import templated_app
from triforce.llm import LLM
from triforce.server.app import system_fingerprint
from triforce.server.request_base import HEADER

CASES = json.loads((Path(__file__).parents[1] / "data" / "everyday" / "server.json").read_text(encoding="utf-8"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4},
    COMPLETIONS: {"prompt": "the cat", "max_tokens": 4},
    RESPONSES: {"input": "the cat", "max_output_tokens": 4},
}
CALLING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    '{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{"arguments": 5}</tool_call>{% endfor %}'
    "{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def calls(pair: Path) -> Iterator[ASGIApp]:
    """The server on a model whose template has calls of tools, and thinking."""
    yield from templated_app(pair, CALLING)


@pytest.fixture(scope="module")
def servers(app: ASGIApp, guarded: ASGIApp, calls: ASGIApp) -> dict[str, ASGIApp]:
    return {"plain": app, "keys": guarded, "calls": calls}


def sent(app: ASGIApp, case: dict[str, Any]) -> httpx.Response:
    """Send what a case describes, without following redirections."""
    content = case["text"].encode(case.get("encoding", "utf-8")) if "text" in case else None

    async def go() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            method = case.get("method", "POST")
            headers = case.get("headers")
            return await client.request(method, case["path"], headers=headers, content=content, json=case.get("body"))

    return asyncio.run(go())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['path']} {case['sent']}")
def test_everyday_request_is_answered_as_listed(servers: dict[str, ASGIApp], case: dict[str, Any]) -> None:
    response = sent(servers[case.get("server", "plain")], case)
    assert response.status_code == case["status"], response.text
    assert response.headers.get(HEADER) == case.get("ignored")
    if case.get("method") == "HEAD":
        assert not response.content
    elif case["status"] >= 400:
        message, param = told_refusal(response)
        assert case["says"] in message and param == case.get("param"), (message, param)


def test_new_name_of_the_limit_wins(app: ASGIApp) -> None:
    limits = {"max_tokens": 9, "max_completion_tokens": 2, "logit_bias": {"1": -100}}
    assert good(ask(app, CHAT, BODIES[CHAT] | limits))["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("sampled", [{"seed": -1}, {}])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_drawn_seed_is_told_and_gives_the_text_again(app: ASGIApp, path: str, stream: bool, sampled: Any) -> None:
    body = BODIES[path] | {"temperature": 1.0, "stream": stream}
    first_answer = ended(ask(app, path, body | sampled), stream)
    assert isinstance(first_answer["seed"], int) and first_answer["seed"] >= 0
    again = ended(ask(app, path, body | {"seed": first_answer["seed"]}), stream)
    assert again["seed"] == first_answer["seed"] and texts_of_answer(again) == texts_of_answer(first_answer)
    assert ended(ask(app, path, body | sampled), stream)["seed"] != first_answer["seed"]


def ended(response: httpx.Response, stream: bool) -> Any:
    """Return the part of an answer that has the seed: a choice, of a stream with the whole text, or a response."""
    if not stream:
        answer = good(response)
        return answer["choices"][0] if "choices" in answer else answer
    chunks = events(response)
    if "choices" not in chunks[-1]:
        return chunks[-1]["response"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return choices[-1] | {"text": "".join(choice.get("text") or "" for choice in choices)}


def texts_of_answer(ended: Any) -> Any:
    """Return the text of a choice or a response."""
    if "output" in ended:
        return ended["output"][0]["content"][0]["text"]
    return ended.get("text", ended.get("message"))


def test_prompts_of_one_request_have_seeds_of_their_own(app: ASGIApp) -> None:
    choices = good(ask(app, COMPLETIONS, {"prompt": ["the cat", "the hat"], "max_tokens": 1, "n": 2}))["choices"]
    seeds = [choice["seed"] for choice in choices]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.parametrize("path", BODIES)
def test_system_fingerprint_is_in_every_answer(app: ASGIApp, llm: LLM, path: str) -> None:
    fingerprint = system_fingerprint(llm)
    assert good(ask(app, path, BODIES[path]))["system_fingerprint"] == fingerprint
    for event in events(ask(app, path, BODIES[path] | {"stream": True})):
        head = event.get("response", event)
        assert head.get("system_fingerprint", fingerprint if path == RESPONSES else None) == fingerprint


def test_system_fingerprint_follows_what_changes_texts(pair: Path, llm: LLM) -> None:
    def made(**settings: Any) -> str:
        return system_fingerprint(LLM(pair / "target", **{"draft": None, **settings}))

    fingerprint = system_fingerprint(llm)
    assert made() == fingerprint == made(draft=pair / "draft", mode="ar", draft_tokens=3)
    other_llms = [made(context=1024), made(dtype="float32"), made(kv_dtype="int8"), made(coupling="rejection")]
    assert len({fingerprint, *other_llms, system_fingerprint(LLM(pair / "draft", None))}) == len(other_llms) + 2


def test_thinking_disabled_is_what_the_template_is_told(calls: ASGIApp) -> None:
    body = {"messages": BODIES[CHAT]["messages"]}
    ids = [good(ask(calls, "/tokenize", body | fields))["tokens"] for fields in ({}, {"thinking": {"type": "enabled"}})]
    without = good(ask(calls, "/tokenize", body | {"thinking": {"type": "disabled"}}))["tokens"]
    assert ids[0] == ids[1] and without[: len(ids[0])] == ids[0] and len(without) > len(ids[0])
    usage = good(ask(calls, CHAT, BODIES[CHAT] | {"thinking": {"type": "disabled"}}))["usage"]
    assert usage["prompt_tokens"] == len(without)


def test_head_has_the_headers_of_get(app: ASGIApp) -> None:
    get, head = (sent(app, {"path": "/v1/models", "method": method}) for method in ("GET", "HEAD"))
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))
