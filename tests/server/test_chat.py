"""/v1/chat/completions and /v1/responses: the model's template renders the messages, and is untrusted code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import SAMPLED, ask, events, good, refused
from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.tokenizer import NAMED_BYTES
from triforce.errors import RequestError
from triforce.interface.outputs import RequestOutput
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
TALK = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "the cat?"}]
TOLD = [{"role": "system", "content": "be brief"}, TALK[1]]
SETTINGS = {key: value for key, value in SAMPLED.items() if key != "max_tokens"}


def expected_output(llm: LLM, messages: list[dict[str, str]] = TOLD, **changes: Any) -> RequestOutput:
    assert llm.tokenizer
    return llm.generate(llm.tokenizer.chat(messages), llm.sampling_params(chat=True, **(SAMPLED | changes)))[0]


def test_chat_answer_equals_generate_after_template(app: ASGIApp, llm: LLM) -> None:
    answer = good(ask(app, CHAT, {"model": "tiny", "messages": TALK, **SETTINGS, "max_completion_tokens": 24}))
    output = expected_output(llm)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == "length" and answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == output.prompt_tokens


def test_llm_chat_without_params_has_usual_sampling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "generate", lambda prompts, params, **how: params)
    assert llm.chat(TOLD) == [llm.sampling_params(chat=True)] and llm.sampling_params(chat=True).top_k == 40


def test_chat_content_parts_join_to_one_text(app: ASGIApp, llm: LLM) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat?"}]
    answer = good(ask(app, CHAT, {"messages": [TALK[0], {"role": "user", "content": parts}], **SAMPLED}))
    assert answer["choices"][0]["message"]["content"] == expected_output(llm).outputs[0].text


def test_chat_answer_can_be_sent_back(app: ASGIApp) -> None:
    message = good(ask(app, CHAT, {"messages": TALK, **SAMPLED}))["choices"][0]["message"]
    again = [*TALK, message | {"tool_calls": None, "audio": None, "annotations": []}, TALK[1]]
    assert ask(app, CHAT, {"messages": again, **SAMPLED}).status_code == 200


def test_chat_stream_adds_up_to_whole(app: ASGIApp) -> None:
    body = {"messages": TALK, **SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 2, "tier_stats": True}
    body |= {"mode": "triforce"}  # in mode auto what a tier did depends on the clock
    full_answer = good(ask(app, CHAT, body))
    *chunks, last_chunk = events(ask(app, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert last_chunk["usage"] == full_answer["usage"] and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    for choice in full_answer["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["finish_reason"] == "length"
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        content = [token for c in mine if c.get("logprobs") for token in c["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"] and len(content[0]["top_logprobs"]) == 2
        assert [tier for c in mine for tier in c.get("token_tiers", [])] == choice["token_tiers"]


def test_chat_logprobs_name_tokens_and_bytes(app: ASGIApp, llm: LLM) -> None:
    (choice,) = good(ask(app, CHAT, {"messages": TALK, **SAMPLED, "logprobs": True}))["choices"]
    entries = expected_output(llm, logprobs=0).outputs[0].logprobs or []
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [e.chosen.logprob for e in entries]
    for token in choice["logprobs"]["content"]:
        assert bytes(token["bytes"]).decode(errors=NAMED_BYTES) == token["token"]


def test_responses_store_nothing(app: ASGIApp, llm: LLM) -> None:
    body = {"instructions": "be brief", "input": "the cat?", **SETTINGS, "max_output_tokens": 24}
    answer = good(ask(app, RESPONSES, body))
    text = expected_output(llm).outputs[0].text
    output = expected_output(llm)
    assert answer["output"][0]["content"][0]["text"] == text and answer["object"] == "response"
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["input_tokens"] == output.prompt_tokens and answer["usage"]["output_tokens"] == 24
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "the cat?"}]}]
    again = good(ask(app, RESPONSES, body | {"input": turns}))
    assert again["output"][0]["content"] == answer["output"][0]["content"]


def test_responses_stream_announces_every_part(app: ASGIApp, llm: LLM) -> None:
    body = {"instructions": "be brief", "input": "the cat?", **SETTINGS, "max_output_tokens": 24, "stream": True}
    announced = events(ask(app, RESPONSES, body))
    assert [event["sequence_number"] for event in announced] == list(range(len(announced)))
    kinds = [event["type"].removeprefix("response.") for event in announced]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = expected_output(llm).outputs[0].text
    assert (
        "".join(e["delta"] for e in announced if e["type"] == "response.output_text.delta")
        == text
        == announced[-4]["text"]
    )


def serve(folder: Path | None, template: str | None) -> tuple[ASGIApp, Worker]:
    llm = LLM(folder)
    assert llm.tokenizer
    if template:
        llm.tokenizer.templates = {"default": template}
    engine = Worker(llm, Limits(waiting=1))
    return create_app(llm, engine, "other"), engine


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_chat_without_template_names_completions(path: str) -> None:
    app, engine = serve(SHIPPED[1], None)
    assert "/v1/completions" in refused(ask(app, path, {"messages": TALK} if path == CHAT else {"input": "x"}))
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ raise_exception('not like this') }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ '%5000000000d'|format(1) }}",
    ],
)
def test_chat_template_stays_in_sandbox(pair: Path, template: str) -> None:
    app, engine = serve(pair / "target", template)
    assert "chat template" in refused(ask(app, CHAT, {"messages": TALK, "max_tokens": 1}))
    asyncio.run(engine.close())


def test_chat_usage_reports_cached_tokens(app: ASGIApp) -> None:
    body = {"messages": [{"role": "user", "content": "a cat on a mat " * 9}], "max_tokens": 2, "temperature": 0}
    first_usage, second = (good(ask(app, CHAT, body))["usage"] for _ in range(2))
    assert first_usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


CALL = {"id": "a", "type": "function", "function": {"name": "depth", "arguments": "{}"}}
ODD_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]},
    {"role": "developer", "content": "be brief"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "30 cm", "tool_call_id": "a"},
    {"role": "wizard", "content": "the cat"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
    {"role": "user", "content": "x", "tool_calls": [CALL]},
    {"role": "user", "content": "x", "tool_call_id": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[]"}}]},
]


@pytest.mark.parametrize("turn", ODD_TURNS, ids=str)
def test_messages_are_read_alike_by_library_and_server(app: ASGIApp, llm: LLM, turn: dict[str, Any]) -> None:
    assert llm.tokenizer
    answer = ask(app, "/tokenize", {"messages": [TALK[1], turn]})
    try:
        ids = llm.tokenizer.chat([TALK[1], turn])
    except RequestError as error:
        assert refused(answer) == str(error) and answer.json()["error"]["param"] == "messages"
    else:
        assert good(answer)["tokens"] == ids
