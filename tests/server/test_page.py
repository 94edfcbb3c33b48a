"""The playground: one file that brings all it needs, runs nothing else, and says nothing of the model."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

import pytest
from asking import SAMPLED, ask, events, good, refused
from starlette.types import ASGIApp

from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.limits import Limits
from triforce.server.worker import Worker

PROMPT = "the cat sat on the mat " * 12


def test_it_brings_all_it_needs(app: ASGIApp) -> None:
    page = ask(app, "/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)|https?://|@import|url\(|\son\w+=|\sstyle=""", page.text)
    policy = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def test_it_is_the_same_without_a_key_and_says_nothing(app: ASGIApp, llm: LLM) -> None:
    engine = Worker(llm, Limits())
    guarded = create_app(llm, engine, "secret-name", keys=["a-key-of-many-letters"])
    page = ask(guarded, "/")
    assert page.text == ask(app, "/").text and "secret-name" not in page.text + str(page.headers)
    refused(ask(guarded, "/", {}), 405)
    refused(ask(guarded, "/v1/models"), 401)
    assert "'/'" not in str(ask(app, "/openapi.json").json()["paths"].keys())
    asyncio.run(engine.close())


def test_every_control_has_a_label(app: ASGIApp) -> None:
    text = ask(app, "/").text
    controls = re.findall(r"<(?:input|select|textarea|canvas)\b[^>]*>", text)
    labelled = set(re.findall(r'<label for="(\w+)"', text))
    wrapped = re.findall(r"<label><(input[^>]*)>", text)
    for control in controls:
        (name,) = re.findall(r'\sid="(\w+)"', control) or [None]
        assert name in labelled or control[1:-1] in wrapped or "aria-label=" in control, control
    assert len(controls) > 8 and 'aria-live="polite"' in text and ":focus-visible" in text


@pytest.mark.parametrize("stop", [None, ["at", "he "]])
def test_each_token_tells_its_length_and_each_piece_where_it_stands(app: ASGIApp, stop: Any) -> None:
    body = {
        "prompt": PROMPT,
        **SAMPLED,
        "stop": stop,
        "stream": True,
        "tier_stats": True,
        "look": True,
        "mode": "triforce",
    }
    *choices, last = [event["choices"][0] for event in events(ask(app, "/v1/completions", body))]
    choices.append(last)
    lengths = [n for choice in choices for n in choice["token_characters"]]
    text = "".join(choice["text"] for choice in choices)
    assert len(lengths) == sum(len(choice["token_tiers"]) for choice in choices)
    assert len(text) == sum(lengths) or (stop and last["finish_reason"] == "stop" and len(text) < sum(lengths))
    looks = [choice["look"] for choice in choices]
    assert all(0 <= percent <= 100 for look in looks for percent in look["seen"])
    assert [tier["name"] for tier in looks[-1]["tiers"]] == ["draft", "retrieval", "full"]
    assert looks[0]["tiers"][0]["proposed"] < looks[-1]["tiers"][0]["proposed"] or len(looks) == 1
    assert looks[-1]["tokens"] >= len(lengths) and len(looks[-1]["seen"]) <= 256


def test_a_chat_tells_it_too(app: ASGIApp) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], **SAMPLED, "stream": True, "look": True}
    told = [event["choices"][0] for event in events(ask(app, "/v1/chat/completions", body))]
    assert sum(n for choice in told for n in choice.get("token_characters", [])) == sum(
        len(choice["delta"].get("content") or "") for choice in told
    )
    assert any(choice.get("look") for choice in told)


def test_nobody_is_told_unasked(app: ASGIApp) -> None:
    body = {"prompt": PROMPT, **SAMPLED, "stream": True, "tier_stats": True}
    assert not any("look" in json.dumps(event) for event in events(ask(app, "/v1/completions", body)))
    assert "needs stream" in refused(ask(app, "/v1/completions", {"prompt": "a", "look": True}))


def test_a_model_says_what_can_be_done_with_it(app: ASGIApp) -> None:
    (card,) = good(ask(app, "/v1/models"))["data"]
    assert card["triforce"]["chats"] is True and "triforce" in card["triforce"]["modes"]
