"""Calls in the format of each family, written by chain models: a real server, a real tokenizer, the doors' clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import httpx2  # which the client of anthropic takes
import ollama
import openai
import pytest
from starlette.types import ASGIApp

from tests.helpers.chain_model import write_chain
from triforce.llm import LLM
from triforce.server.app import create_app
from triforce.server.engine_thread import Worker
from triforce.server.limits import Limits

SIZE = {
    "type": "object",
    "properties": {"of": {"type": "string"}, "cm": {"type": "integer"}},
    "required": ["of", "cm"],
}
FUNCTIONS: list[Any] = [{"name": "size", "description": "measures", "parameters": SIZE}]
ARGUMENTS = {"of": "cat <b>", "cm": 30}
TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}"


class Family(NamedTuple):
    """A chat template with the marks of a family, and a text with a call that its models write."""

    text: str
    template: str
    marks: tuple[str, ...] = ()
    """Special tokens."""
    plain_marks: tuple[str, ...] = ()
    """Tokens that are shown as text."""
    thoughts: str = ""
    answer: str = ""
    """The text beside the call."""
    forced: str = ""
    """A text as a required call writes it; empty where `text` is one."""


JSON_CALL = '{"name": "size", "arguments": {"of": "cat <b>", "cm": 30}}'
FAMILIES = {
    "qwen": Family(
        f"So:\n<tool_call>\n{JSON_CALL}\n</tool_call>",
        TURN + '{# <tool_call> "arguments" #}',
        plain_marks=("<tool_call>", "</tool_call>"),
        answer="So:",
        forced=f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    ),
    "qwen-text": Family(
        f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        TURN.replace("{{ tools }}", "") + "{# no t_o_o_l #}",
    ),
    "qwen-xml": Family(
        "<think>hm</think>\n\n<tool_call>\n<function=size>\n<parameter=of>\ncat <b>\n</parameter>\n<parameter=cm>\n30\n"
        "</parameter>\n</function>\n</tool_call>",
        TURN + "{# <think></think> <function=a> <parameter=b> #}",
        plain_marks=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        thoughts="hm",
        forced="<tool_call>\n<function=size>\n<parameter=of>\ncat <b>\n</parameter>\n<parameter=cm>\n30\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "llama": Family(
        '{"name": "size", "parameters": {"of": "cat <b>", "cm": 30}}',
        TURN + '{# "parameters": ipython #}',
        ("<|python_tag|>", "<|eom_id|>"),
    ),
    "llama-tag": Family(
        '<|python_tag|>{"name": "size", "parameters": {"of": "cat <b>", "cm": 30}}<|eom_id|>',
        TURN + '{# "parameters": ipython #}',
        ("<|python_tag|>", "<|eom_id|>"),
        forced='{"name": "size", "parameters": {"of": "cat <b>", "cm": 30}}',
    ),
    "mistral": Family(
        f"[TOOL_CALLS] [{JSON_CALL}]",
        TURN + "{# [TOOL_CALLS] #}",
        ("[TOOL_CALLS]",),
    ),
    "mistral-named": Family(
        '[THINK]hm[/THINK]So.[TOOL_CALLS]size[ARGS]{"of": "cat <b>", "cm": 30}',
        TURN + "{# [TOOL_CALLS] [ARGS] [THINK][/THINK] #}",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        thoughts="hm",
        answer="So.",
        forced='[TOOL_CALLS]size[ARGS]{"of": "cat <b>", "cm": 30}',
    ),
    "mistral-id": Family(
        '[TOOL_CALLS]size[CALL_ID]abcdefghi[ARGS]{"of": "cat <b>", "cm": 30}',
        TURN + "{# [TOOL_CALLS] [ARGS] #}",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        forced='[TOOL_CALLS]size[ARGS]{"of": "cat <b>", "cm": 30}',
    ),
    "harmony": Family(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.size <|constrain|>json<|message|>{"of": "cat <b>", '
        '"cm": 30}<|call|>',
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools }}"
        "{# <|channel|> #}<|start|>assistant",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        thoughts="hm",
        answer="So.",
        forced='<|channel|>commentary to=functions.size <|constrain|>json<|message|>{"of": "cat <b>", "cm": 30}',
    ),
    "harmony-role": Family(
        ' to=functions.size<|channel|>commentary json<|message|>{"of": "cat <b>", "cm": 30}<|call|>',
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools }}"
        "{# <|channel|> #}<|start|>assistant",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        forced='<|channel|>commentary to=functions.size <|constrain|>json<|message|>{"of": "cat <b>", "cm": 30}',
    ),
    "glm": Family(
        "<think>hm</think>So.\n<tool_call>size\n<arg_key>of</arg_key>\n<arg_value>cat <b></arg_value>\n"
        "<arg_key>cm</arg_key>\n<arg_value>30</arg_value>\n</tool_call>",
        TURN + "{# <tool_call> <arg_key> <think></think> #}",
        plain_marks=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            *("<think>", "</think>"),
        ),
        thoughts="hm",
        answer="So.",
        forced="<tool_call>size\n<arg_key>of</arg_key>\n<arg_value>cat <b></arg_value>\n<arg_key>cm</arg_key>\n"
        "<arg_value>30</arg_value>\n</tool_call>",
    ),
    "gemma": Family(
        '<|channel>thought\nhm<channel|>So.<|tool_call>call:size{cm:30,of:<|"|>cat <b><|"|>}<tool_call|>',
        TURN + '{# <|tool_call> <|"|> <channel|> #}',
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        thoughts="hm",
        answer="So.",
        forced='<|tool_call>call:size{cm:30,of:<|"|>cat <b><|"|>}<tool_call|>',
    ),
    "function-gemma": Family(
        "<start_function_call>call:size{cm:<escape>30<escape>,of:<escape>cat <b><escape>}<end_function_call>",
        TURN + "{# <start_function_call> <escape> #}",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        forced="<start_function_call>call:size{cm:30,of:<escape>cat <b><escape>}<end_function_call>",
    ),
    "granite": Family(
        f"<|tool_call|>[{JSON_CALL}]",
        TURN + "{# <|tool_call|> <|end_of_role|> #}",
        ("<|tool_call|>",),
    ),
    "phi": Family(
        f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>",
        TURN + "{# <|tool|> #}",
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
}


def served_chain(folder: Path, family: Family, text: str) -> Iterator[ASGIApp]:
    """Yield the server of a model that writes `text`, with the family's template and marks."""
    last = family.template[-1] if family.template.endswith("assistant") else "."
    template = family.template if last != "." else family.template + "."
    llm = LLM(write_chain(folder, text, family.marks, template, last, family.plain_marks))
    engine = Worker(llm, Limits(waiting=2))
    yield create_app(llm, engine, "chain")
    asyncio.run(engine.close())


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def app(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ASGIApp]:
    yield from served_chain(tmp_path_factory.mktemp("chain"), FAMILIES[name], FAMILIES[name].text)


@pytest.fixture(scope="module")
def forced_app(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ASGIApp]:
    family = FAMILIES[name]
    yield from served_chain(tmp_path_factory.mktemp("chain"), family, family.forced or family.text)


class Told(NamedTuple):
    """What a client reads of an answer."""

    text: str
    thoughts: str
    calls: list[tuple[str, Any]]
    finish: str


def client_of(app: ASGIApp) -> openai.AsyncOpenAI:
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(api_key="x", base_url="http://localhost/v1", http_client=transport, max_retries=0)


async def chat(app: ASGIApp, stream: bool, **options: Any) -> Told:
    """Return an answer of chats. A stream's increments are joined as clients join them."""
    tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
    asked: Any = {"model": "chain", "messages": [{"role": "user", "content": "the cat?"}], "tools": tools} | options
    async with client_of(app) as client:
        if not stream:
            (choice,) = (await client.chat.completions.create(**asked)).choices
            calls = [
                (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
            ]
            thoughts = (choice.message.model_extra or {}).get("reasoning_content", "")
            return Told(choice.message.content or "", thoughts, calls, choice.finish_reason)
        text = thoughts = finish = ""
        parts: dict[int, list[str]] = {}
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thoughts += (choice.delta.model_extra or {}).get("reasoning_content", "")
                finish = choice.finish_reason or finish
                for call in choice.delta.tool_calls or ():
                    name, arguments = parts.setdefault(call.index, ["", ""])
                    parts[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
        return Told(text, thoughts, [(name, json.loads(arguments)) for name, arguments in parts.values()], finish)


async def response(app: ASGIApp, stream: bool, **options: Any) -> Told:
    """Return an answer of responses. A stream's last event holds it whole."""
    tools: Any = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    asked: Any = {"model": "chain", "input": "the cat?", "tools": tools} | options
    async with client_of(app) as client:
        if stream:
            async with client.responses.stream(**asked) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
    calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
    thoughts = "".join(part.text for item in answer.output if item.type == "reasoning" for part in item.summary)
    return Told(answer.output_text, thoughts, calls, answer.status)


async def message(app: ASGIApp, stream: bool, **options: Any) -> Told:
    """Return an answer of Anthropic's interface. A stream's increments are joined by its client."""
    tools: Any = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS
    ]
    messages = [{"role": "user", "content": "the cat?"}]
    asked: Any = {"model": "chain", "messages": messages, "tools": tools, "max_tokens": 1000} | options
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    client = anthropic.AsyncAnthropic(api_key="x", base_url="http://localhost", http_client=transport, max_retries=0)
    async with client:
        if stream:
            async with client.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
    text = "".join(block.text for block in answer.content if block.type == "text")
    thoughts = "".join(block.thinking for block in answer.content if block.type == "thinking")
    calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    return Told(text, thoughts, calls, answer.stop_reason or "")


async def ollama_chat(app: ASGIApp, stream: bool, **options: Any) -> Told:
    """Return an answer of Ollama's interface. A stream's lines are joined as clients join them."""
    tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
    asked: Any = {"model": "chain", "messages": [{"role": "user", "content": "the cat?"}], "tools": tools} | options
    client = ollama.AsyncClient(host="http://localhost", transport=httpx.ASGITransport(app))
    if stream:
        answers = [part async for part in await client.chat(stream=True, **asked)]
    else:
        answers = [await client.chat(stream=False, **asked)]
    messages = [answer.message for answer in answers]
    calls = [(c.function.name, dict(c.function.arguments)) for m in messages for c in m.tool_calls or ()]
    text = "".join(m.content or "" for m in messages)
    return Told(text, "".join(m.thinking or "" for m in messages), calls, answers[-1].done_reason or "")


FINISHES = {chat: "tool_calls", response: "completed", message: "tool_use", ollama_chat: "stop"}
"""Why an answer with a call ends, by door."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", FINISHES)
def test_call_of_each_family_is_found(app: ASGIApp, name: str, door: Any, stream: bool) -> None:
    family = FAMILIES[name]
    told = asyncio.run(door(app, stream))
    assert told == Told(family.answer, family.thoughts, [("size", ARGUMENTS)], FINISHES[door])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("door", "choice"),
    [
        *((door, {"tool_choice": "required", "parallel_tool_calls": False}) for door in (chat, response)),
        (message, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ],
)
def test_required_call_of_each_family_is_written(forced_app: ASGIApp, door: Any, choice: Any, stream: bool) -> None:
    assert asyncio.run(door(forced_app, stream, **choice)) == Told("", "", [("size", ARGUMENTS)], FINISHES[door])


def test_call_that_is_cut_leaves_no_markup(app: ASGIApp, name: str) -> None:
    family = FAMILIES[name]
    whole = asyncio.run(chat(app, False))
    for limit in range(1, 200):
        told = asyncio.run(chat(app, False, max_tokens=limit))
        assert family.answer.startswith(told.text.strip()) and family.thoughts.startswith(told.thoughts)
        if told.calls:
            assert told.calls == whole.calls
            break
        assert told.finish == "length"
    else:
        raise AssertionError("no call")


def test_text_without_tools_shows_no_special_token(app: ASGIApp, name: str) -> None:
    told = asyncio.run(chat(app, False, tools=openai.NOT_GIVEN))
    assert not told.calls and not any(mark in told.text for mark in FAMILIES[name].marks)
    assert (told.text + told.thoughts).encode()
