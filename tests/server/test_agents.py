"""The contract with agents: their requests, in conversations of many turns, are answered, cached and lossless."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp

from tests.helpers.agent_clients import CLIENTS, AgentClient, Aider, ClaudeCode, Codex, Continue, events_of, sent
from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.pages import ROOT
from tests.server.test_call_families import ARGUMENTS, FAMILIES, FUNCTIONS, served_chain
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.doors.responses import ResponsesBody
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

ANSWER_TOKENS = 6
"""Length of an answer of a real model, at which each turn is compared with itself without a cache."""
WHOLE_LENGTH = 20_000
"""Characters of instructions as long as those of agents, as far as the context of the real model allows."""
BLOCK = 64
"""Tokens at the end of a prompt that a later prompt may hold otherwise: the beginning of an answer."""


@pytest.fixture(scope="module", params=["qwen", "qwen-xml", "harmony", "mistral-named", "gemma", "glm"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ASGIApp]]:
    """The name of a family, and the server of a model that writes a call in its format."""
    family = FAMILIES[request.param]
    for app in served_chain(tmp_path_factory.mktemp("chain"), family, family.text):
        yield request.param, app


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ASGIApp]:
    if not SMOLLM2.is_file():
        pytest.skip("there is no file of smollm2; fetch it with `make smollm2`")
    llm = LLM(str(SMOLLM2))
    engine = Worker(llm, Limits(waiting=2))
    yield create_app(llm, engine, "smollm2")
    asyncio.run(engine.close())


@pytest.mark.parametrize("client_class", CLIENTS, ids=lambda client: client.name)
def test_agent_conversation_with_calls_is_answered(chain: tuple[str, ASGIApp], client_class: type[AgentClient]) -> None:
    """Each turn calls the same function, and its result is sent back."""
    _, app = chain
    client = client_class()
    client.limited(500)
    if client_class is not Aider:
        client.body["tools"] = [*client.body["tools"], client.tool(FUNCTIONS[0])]
    for turn in range(3):
        answer = client.ask(app)
        if "tools" in client.body:
            (call,) = answer.calls
            function = call.get("function", call)
            arguments = function.get("input", function.get("arguments"))
            assert function["name"] == "size"
            assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == ARGUMENTS
        client.replay(answer, f"and turn {turn}?")


@pytest.mark.parametrize("client_class", CLIENTS, ids=lambda client: client.name)
def test_agent_asks_beside_its_conversation(chain: tuple[str, ASGIApp], client_class: type[AgentClient]) -> None:
    """Lists of models, titles, counts of tokens, probes."""
    _, app = chain
    client = client_class()
    for request in client.recorded.get("before", ()):
        sent(app, request, request.get("body"))
    for request in client.recorded.get("side_requests", ()):
        if "body" in request:
            sent(app, {"headers": client.recorded["headers"], "door": request["door"]}, request["body"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [0, pytest.param(WHOLE_LENGTH, marks=pytest.mark.slow)])
@pytest.mark.parametrize("client_class", CLIENTS, ids=lambda client: client.name)
def test_agent_turns_of_real_model_are_cached_and_lossless(
    smollm2: ASGIApp, client_class: type[AgentClient], length: int
) -> None:
    """length: characters that are added to the client's instructions, up to their true length."""
    client = client_class()
    client.limited(ANSWER_TOKENS)
    client.lengthen(f"\n{client.name}\n" + (ROOT / "docs/reference/python.md").read_text()[:length])
    first_answer = client.ask(smollm2)
    client.replay(first_answer, "Which file has the function?")
    cached_answer = client.ask(smollm2)
    if client_class is Aider:  # the reminder at the end of the first prompt is not in the second one's middle
        assert cached_answer.cached_tokens > first_answer.prompt_tokens // 2
    elif not (client_class is Continue and first_answer.calls):  # it leaves out its tools behind results
        assert cached_answer.cached_tokens > first_answer.prompt_tokens - BLOCK
    read_again = client.ask(smollm2, cache=False)
    assert read_again.cached_tokens == 0 and read_again.text == cached_answer.text
    assert read_again.prompt_tokens == cached_answer.prompt_tokens


def test_codex_calls_keep_names_of_their_tools(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model sees one name; the client wants the namespace apart, and free text as text."""
    namespace = {"type": "namespace", "name": "mcp__cat__", "description": "x", "tools": []}
    function = {"type": "function", "name": "size", "parameters": FUNCTIONS[0]["parameters"]}
    custom = {"type": "custom", "name": "size", "format": {"type": "grammar", "syntax": "lark", "definition": "x: /y/"}}
    for tool, arguments, kind in (
        (function, {"of": "cat", "cm": 30}, "function_call"),
        (custom, {"input": "*** Begin\n"}, "custom_tool_call"),
        (custom, {"patch": "*** Begin\n"}, "custom_tool_call"),
    ):
        text = json.dumps({"name": "mcp__cat__size", "arguments": arguments})
        family = FAMILIES["qwen"]._replace(text=f"<tool_call>\n{text}\n</tool_call>")
        for app in served_chain(tmp_path_factory.mktemp("chain"), family, family.text):
            client = Codex()
            client.body["tools"] = [namespace | {"tools": [tool]}]
            answer = client.ask(app)
            (call,) = answer.calls
            assert (call["type"], call["name"], call["namespace"]) == (kind, "size", "mcp__cat__")
            if kind == "custom_tool_call":
                assert call["input"] == "*** Begin\n"
                kinds = [event["type"] for event in events_of(sent(app, client.recorded, client.body))]
                assert "response.custom_tool_call_input.delta" in kinds
            else:
                assert json.loads(call["arguments"]) == arguments
            client.replay(answer, "")
            body = ResponsesBody.model_validate(client.body)
            (called,) = (call for turn in body.turns for call in turn.tool_calls or ())
            assert called.function.name == "mcp__cat__size"


def test_claude_code_billing_line_is_no_part_of_the_prompt(chain: tuple[str, ASGIApp]) -> None:
    _, app = chain
    client = ClaudeCode()
    count = {"door": "/v1/messages/count_tokens"}
    counted = sent(app, count, client.body)
    client.body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=3; cc_entrypoint=cli; cch=f00;\nmore\n"
    longer = sent(app, count, client.body)
    client.body["system"][0]["text"] = "more\n"
    assert longer.json() == sent(app, count, client.body).json() != counted.json()
    client.body["system"] = client.body["system"][1:]
    assert counted.json() == sent(app, count, client.body).json()


def test_codex_prompt_beyond_the_context_is_an_event(app: ASGIApp) -> None:
    """Codex shortens its conversation for that event only."""
    client = Codex()
    client.body["input"] = "x " * 3000
    told = events_of(sent(app, client.recorded, client.body))
    assert [event["type"] for event in told] == ["response.created", "response.failed"]
    assert told[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert "context of 2048" in told[-1]["response"]["error"]["message"]


def test_codex_answer_that_fills_the_context_is_no_incomplete_response(app: ASGIApp) -> None:
    """Codex would send the request again."""
    client = Codex()
    client.body |= {"input": "x " * 800, "ignore_eos": True, "tools": []}
    told = events_of(sent(app, client.recorded, client.body))
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert told[-1]["response"]["output"][0]["content"][0]["text"]
