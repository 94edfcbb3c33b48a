"""Calls of one client library to a running server: python client_calls.py CLIENT CALL URL MODEL KEY.

`clients.py` runs this program in the environment that has the libraries. Each client is constructed as in its
documentation, with its defaults and a limit of tokens. A failed call or an empty answer raises, so the exit code is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from inspect import getsource
from pathlib import Path
from typing import Any

KEY = sys.argv[-1]
ASKED = "Name a fruit and say how many letters its name has."
WEATHER = "What is the weather in Paris?"
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 64}
"""Limits of an answer that is a call."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "letters": {"type": "integer"}},
    "required": ["name", "letters"],
    "additionalProperties": False,
}


def fruit() -> Any:
    """Return a pydantic model that answers must fit."""
    from pydantic import BaseModel, Field

    class Fruit(BaseModel):
        name: str = Field(max_length=20)
        letters: int

    return Fruit


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": get_weather.__doc__,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def turns(text: str = ASKED) -> list[Any]:
    return [{"role": "user", "content": text}]


def joined(pieces: Iterable[str | None]) -> str:
    """Return the text of a stream. Raises ValueError if the stream has fewer than two pieces."""
    texts = [piece for piece in pieces if piece]
    if len(texts) < 2:
        raise ValueError(f"a stream of {len(texts)} pieces")
    return "".join(texts)


def openai(call: str, url: str, model: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=KEY)
    chats = client.chat.completions
    common = {"model": model, "messages": turns(), **SHORT}
    if call == "plain":
        answer = client.responses.create(model=model, input=ASKED, temperature=0, max_output_tokens=32).output_text
        assert answer == chats.create(**common).choices[0].message.content
        return answer
    if call == "streamed":
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last_chunk = chats.create(**common, **options)
        assert last_chunk.usage.completion_tokens
        return joined(chunk.choices[0].delta.content for chunk in chunks)
    if call == "structured":
        responses = client.responses.parse(model=model, input=ASKED, text_format=fruit(), temperature=0)
        return responses.output_parsed and chats.parse(**common, response_format=fruit()).choices[0].message.parsed
    calling = common | {"messages": turns(WEATHER), **LONG}
    choice = "required" if call == "required" else "auto"
    calling |= {"parallel_tool_calls": False}  # a small model calls up to the limit, which this client refuses to read
    with chats.stream(**calling, tools=[TOOL], tool_choice=choice) as stream:
        streamed_calls = stream.get_final_completion().choices[0].message.tool_calls
    flat_tool = {"type": "function", "strict": False, **TOOL["function"]}
    response = client.responses.create(
        model=model, input=WEATHER, tools=[flat_tool], tool_choice=choice, temperature=0, max_output_tokens=64
    )
    assert streamed_calls and any(item.type == "function_call" for item in response.output)
    return chats.create(**calling, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls


def langchain(call: str, url: str, model: str) -> Any:
    from langchain_openai import ChatOpenAI

    limits = LONG if call in ("tools", "required") else SHORT
    chat = ChatOpenAI(base_url=url, api_key=KEY, model=model, **limits)
    if call == "plain":
        return chat.invoke(ASKED).content
    if call == "streamed":
        return joined(piece.content for piece in chat.stream(ASKED))
    if call == "structured":
        return chat.with_structured_output(fruit()).invoke(ASKED)
    choice = "required" if call == "required" else None
    return chat.bind_tools([get_weather], tool_choice=choice).invoke(WEATHER).tool_calls


def litellm(call: str, url: str, model: str) -> Any:
    from litellm import completion

    common = {"model": f"openai/{model}", "api_base": url, "api_key": KEY, "messages": turns(), **SHORT}
    if call == "plain":
        return completion(**common).choices[0].message.content
    if call == "streamed":
        return joined(chunk.choices[0].delta.content for chunk in completion(**common, stream=True))
    if call == "structured":
        return fruit().model_validate_json(completion(**common, response_format=fruit()).choices[0].message.content)
    choice = "required" if call == "required" else "auto"
    calling = common | {"messages": turns(WEATHER), **LONG}
    return completion(**calling, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls


def llama_index(call: str, url: str, model: str) -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    settings: dict[str, Any] = {"model": model, "api_base": url, "api_key": KEY, "is_chat_model": True, **SHORT}
    messages = [ChatMessage(role="user", content=ASKED)]
    if call == "plain":
        return OpenAILike(**settings).chat(messages).message.content
    if call == "streamed":
        return joined(piece.delta for piece in OpenAILike(**settings).stream_chat(messages))
    if call == "structured":
        structured_llm = OpenAILike(**settings, should_use_structured_outputs=True).as_structured_llm(fruit())
        return structured_llm.chat(messages).raw
    asking = OpenAILike(**settings | LONG, is_function_calling_model=True)
    tools = [FunctionTool.from_defaults(get_weather)]
    answer = asking.chat_with_tools(tools, user_msg=WEATHER, tool_required=call == "required")
    return asking.get_tool_calls_from_response(answer)


def instructor(call: str, url: str, model: str) -> Any:
    from instructor import Mode, Partial, from_openai
    from openai import OpenAI

    client = from_openai(OpenAI(base_url=url, api_key=KEY), mode=Mode.TOOLS if call == "required" else Mode.JSON_SCHEMA)
    common = {"model": model, "messages": turns(), **(LONG if call == "required" else SHORT)}
    if call == "plain":
        return client.chat.completions.create(**common, response_model=None).choices[0].message.content
    if call == "streamed":
        *_, last_partial = client.chat.completions.create(**common, response_model=Partial[fruit()], stream=True)
        return last_partial.name and last_partial.letters is not None
    return client.chat.completions.create(**common, response_model=fruit(), max_retries=0)


def outlines(call: str, url: str, model: str) -> Any:
    from openai import OpenAI
    from outlines import from_openai

    client = from_openai(OpenAI(base_url=url, api_key=KEY), model)
    if call == "plain":
        return client(ASKED, **SHORT)
    if call == "streamed":
        return joined(client.stream(ASKED, **SHORT))
    return fruit().model_validate_json(client(ASKED, fruit(), **SHORT))


def llm(call: str, url: str, model: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        can = "supports_schema: true\n  supports_tools: true\n"
        entry = f"- model_id: local\n  model_name: {model}\n  api_base: {url}\n  api_key_name: local\n  {can}"
        (Path(folder) / "extra-openai-models.yaml").write_text(entry)
        (Path(folder) / "keys.json").write_text(json.dumps({"local": KEY}))
        key_options = {
            "plain": ["--no-stream"],
            "streamed": [],
            "structured": ["--schema", json.dumps(SCHEMA)],
            "tools": ["--functions", getsource(get_weather), "--tools-debug"],
        }[call]
        asked = WEATHER if call == "tools" else ASKED
        limits = ["-o", "max_tokens", "32", "-o", "temperature", "0"]
        command = [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "local", *limits, *key_options, asked]
        done = subprocess.run(
            command, env=os.environ | {"LLM_USER_PATH": folder}, capture_output=True, text=True, timeout=300
        )
    if done.returncode:
        raise ValueError(done.stderr)
    if call == "tools":
        return "get_weather" in done.stderr
    return fruit().model_validate_json(done.stdout) if call == "structured" else done.stdout.strip()


def anthropic(call: str, url: str, model: str) -> Any:
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY)
    common: Any = {"model": model, "messages": turns(), "max_tokens": 32, "extra_body": {"temperature": 0}}
    if call == "plain":
        assert client.messages.count_tokens(model=model, messages=turns()).input_tokens
        return client.messages.create(**common).content[0].text
    if call == "streamed":
        with client.messages.stream(**common) as stream:
            return joined(stream.text_stream)
    if call == "structured":
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = client.messages.create(**common | {"extra_body": {"temperature": 0, "output_config": config}})
        return fruit().model_validate_json(answer.content[0].text)
    function = TOOL["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    choice: Any = {"type": "any" if call == "required" else "auto", "disable_parallel_tool_use": True}
    calling = common | {"messages": turns(WEATHER), "max_tokens": 64, "tools": [tool], "tool_choice": choice}
    with client.messages.stream(**calling) as stream:
        streamed = stream.get_final_message()
    assert [block.name for block in streamed.content if block.type == "tool_use"] == [function["name"]]
    return [block.input for block in client.messages.create(**calling).content if block.type == "tool_use"]


def ollama(call: str, url: str, model: str) -> Any:
    from ollama import Client

    client = Client(host=url.removesuffix("/v1"), headers={"Authorization": f"Bearer {KEY}"})
    assert model in [entry.model.removesuffix(":latest") for entry in client.list().models]
    common: Any = {"model": model, "messages": turns(), "options": {"temperature": 0, "num_predict": 32}}
    if call == "plain":
        assert client.show(model).capabilities and client.generate(model, ASKED, options=common["options"]).response
        return client.chat(**common).message.content
    if call == "streamed":
        return joined(part.message.content for part in client.chat(**common, stream=True))
    if call == "structured":
        return fruit().model_validate_json(client.chat(**common, format=SCHEMA).message.content)
    common |= {"messages": turns(WEATHER), "options": {"temperature": 0, "num_predict": 64}}
    return client.chat(**common, tools=[get_weather]).message.tool_calls


CLIENTS = {
    client.__name__: client
    for client in (openai, langchain, litellm, llama_index, instructor, outlines, llm, anthropic, ollama)
}
"""Functions by client. Each takes a call, the URL with /v1 and the model's name, and returns the answer of the call."""


def main(client: str, call: str, url: str, model: str) -> None:
    """Make a call, and print its answer. Raises the client's exceptions, and ValueError for an empty answer."""
    answer = CLIENTS[client](call, f"{url}/v1", model)
    if not answer:
        raise ValueError(f"the answer is empty: {answer!r}")
    print(repr(answer)[:300])


if __name__ == "__main__":
    main(*sys.argv[1:-1])
