"""Chats are laid out as in transformers: the text of a conversation, and operations that a template may not use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken

from tests.helpers.tiny_checkpoint import edit
from tests.helpers.tokenizer_folders import MADE, both, byte_level
from triforce.checkpoint import chat_template
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("only single tool-calls") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}" + eos_token }}
    {%- elif message.role == "tool" %}
        {{- "ipython\\n\\n" }}{{- message.content if message.content is string else message.content | tojson }}
    {%- else %}
        {{- message['role'] + '\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant\\n\\n' }}{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}{% endfor %}"""
QWEN = """{%- if tools %}
    {{- "<|im_start|>system\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
    {%- if loop.index0 > 7 %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for tool_call in message.tool_calls %}
        {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
        {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
        {{- tool_call.arguments | tojson(sort_keys=true, separators=(',', ':')) }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' ~ loop.index0 ~ (ns.last < loop.index0) }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TRAINED = """{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{% set x = m.content %}{{ x }} {% endgeneration %}{% else %}
{{ m.content }}{{ x }}{{ dict(a=1)['a'] }}{{ pad_token }}|{{ unk_token }}|{{ documents is none }}
{% endif %}{% endfor %}"""
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA3, "Mistral": MISTRAL, "Qwen": QWEN, "generation": TRAINED}

SIZE = {"type": "object", "properties": {"of": {"type": "string", "description": "Größe <b> 'quoted'"}}}
TOOLS = [
    {"type": "function", "function": {"name": "size", "description": "measures", "parameters": SIZE}},
    {"type": "function", "function": {"name": "purr", "parameters": {"minimum": 0.1, "nullable": None}}},
]
CALL = [{"type": "function", "function": {"name": "size", "arguments": {"of": "the 🙂 cat", "at": [1, 2.5, None]}}}]
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hat & <b>cat</b>\n"}],
    [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "東京?"},
        {"role": "assistant", "content": "", "tool_calls": CALL},
        {"role": "tool", "content": "12", "tool_call_id": "a"},
        {"role": "assistant", "content": "it is 12", "tool_calls": None},
        {"role": "user", "content": "thanks"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
    [],
]


def outcome(render: Callable[[], Any]) -> Any:
    """Return the rendered text, or that rendering fails."""
    try:
        return render()
    except RequestError as error:
        return str(error).partition("messages: ")[2]
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tokenizer_kind", ["byte level", "a first token"])
def test_chat_layout_equals_transformers(tmp_path: Path, name: str, tokenizer_kind: str) -> None:
    MADE[tokenizer_kind](tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    ours, theirs = both(tmp_path)
    good = 0
    for talk in TALKS[:-1]:
        for tools in (None, TOOLS):
            if "tool" not in TEMPLATES[name] and (tools or any("tool" in str(turn) for turn in talk)):
                continue  # `told_in_text` rewrites them

            def text(talk: Any = talk, tools: Any = tools) -> list[int]:
                chat = theirs.apply_chat_template(talk, tools, add_generation_prompt=True, tokenize=False)
                return list(theirs.encode(chat, add_special_tokens=False))

            expected = outcome(text)
            assert outcome(lambda: ours.chat(talk, tools, continue_final=False)) == expected  # noqa: B023
            good += isinstance(expected, list)
    assert good >= 2


DIALECTS: dict[str, tuple[str, object]] = {
    "JSON for HTML": ("_to_json", json.dumps),
    "blocks that leave their spaces": (
        "ImmutableSandboxedEnvironment",
        lambda **options: ImmutableSandboxedEnvironment(**(options | {"lstrip_blocks": False})),
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_chat_wrong_dialect_is_detected(monkeypatch: pytest.MonkeyPatch, dialect: str) -> None:
    template = "  {% if true %}{{ 'ü'|tojson }}{% endif %}"
    assert chat_template.render(template, {}) == '"ü"'
    monkeypatch.setattr(chat_template, *DIALECTS[dialect])
    marked_template = f"{template}{{# {dialect} #}}"  # compiled templates are cached by their text
    assert chat_template.render(marked_template, {}) != '"ü"'


@pytest.mark.parametrize("files", [True, False])
def test_named_templates_are_read(tmp_path: Path, files: bool) -> None:
    byte_level(tmp_path)
    named = {"default": "plain", "tool_use": "tools {{ tools|length }}", "rag": "cat"}
    if files:
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in named.items():
            file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
            (tmp_path / f"{file}.jinja").write_text(text)
    else:
        edit(tmp_path / "tokenizer_config.json", chat_template=[{"name": n, "template": t} for n, t in named.items()])
    ours, theirs = both(tmp_path)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(TALKS[0], tools, tokenize=False)
        assert ours.chat(TALKS[0], tools) == theirs.encode(expected, add_special_tokens=False)
    del ours.templates["default"]  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="no template is called default, only "):
        ours.chat(TALKS[0])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}{% if messages.__class__.__mro__ %}escaped{% endif %}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__globals__['json'] }}",
        "{{ (messages|first).__init__.__globals__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% if %}",
    ],
)
def test_template_sandbox_blocks_escapes(tmp_path: Path, template: str) -> None:
    byte_level(tmp_path, chat_template=template)
    with pytest.raises(RequestError, match="chat template does not accept"):
        Tokenizer.load(tmp_path).chat(TALKS[0])


def test_template_errors_are_plain(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template="{{ messages[0].content.read() }}")
    with pytest.raises(RequestError, match="not JSON serializable"):
        Tokenizer.load(tmp_path).chat([{"role": "user", "content": "x", "name": AddedToken("x")}])
