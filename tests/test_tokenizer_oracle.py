"""Tokenizers and chats are those of transformers: ids, special tokens, vocabularies, and the text of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from test_tokenizer import llama2_tokenizer
from tiny_checkpoint import edit, tiny_tokenizer
from tokenizers import AddedToken, processors

from triforce.checkpoint import chat_template
from triforce.checkpoint.tokenizer import Tokenizer, configured_eos_ids
from triforce.errors import ModelError, RequestError

TEXTS = [
    "the cat sat on the mat",
    " naïve  café — 東京 🙂\n\n\tx ",
    "",
    "<s>the hat</s><s> the cat",
    "a <s> b <s>",
    "<|call|>a<|call|> b<|late|>the <|im_end|>\n",
    "a <tool> b<pad>c",
]
PLAIN = [text for text in TEXTS if not text.startswith((" ", "<")) and "<s>" not in text]


def byte_level(folder: Path, **options: Any) -> None:
    tiny_tokenizer(**options).save_pretrained(folder)


def with_bos(folder: Path) -> None:
    hf = tiny_tokenizer()
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    hf.save_pretrained(folder)


def asked_for_bos(folder: Path) -> None:
    """What tokenizer.json does counts."""
    byte_level(folder)
    edit(folder / "tokenizer_config.json", add_bos_token=True, add_eos_token=True)


def with_tokens_in_the_config(folder: Path) -> None:
    byte_level(folder)
    late = {"content": "<|late|>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    call = late | {"content": "<|call|>", "special": True, "lstrip": False}
    decoder = {"300": call, "0": call | {"content": "<s>"}, "299": late}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, pad_token="<pad>", image_token="<|im_end|>")


def found_otherwise(folder: Path) -> None:
    """The config has the last word on how a token is found in a text, and on which are special."""
    byte_level(folder)
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    decoder = {
        "0": plain | {"content": "<s>", "rstrip": True, "lstrip": True, "special": True},
        "300": plain | {"content": "<|call|>", "special": False},
        "301": plain | {"content": "<pad>"},
    }
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder=decoder,
        extra_special_tokens=["<|call|>"],
        pad_token="<pad>",
    )


def with_files_of_old(folder: Path) -> None:
    byte_level(folder)
    end = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    special = {"eos_token": end, "additional_special_tokens": ["<|call|>"], "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 300, "<|im_end|>": 301}))
    edit(folder / "tokenizer_config.json", eos_token=...)


def with_named_extras(folder: Path) -> None:
    byte_level(folder)
    edit(folder / "tokenizer_config.json", extra_special_tokens={"tool_token": "<tool>"}, unk_token=None)


def with_extras(folder: Path) -> None:
    byte_level(folder)
    edit(folder / "tokenizer_config.json", extra_special_tokens=["<tool>", "<|call|>"])


def that_splits(folder: Path) -> None:
    byte_level(folder)
    edit(folder / "tokenizer_config.json", split_special_tokens=True)


def of_class(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        vocab = tiny_tokenizer().get_vocab()
        model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
        if name == "LlamaTokenizer":
            pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "東"]
            vocab, model = {p: i for i, p in enumerate(pieces)}, {"merges": [("▁", "a"), ("a", "b")]}
        else:
            vocab["<|endoftext|>"] = len(vocab)
        merges = [tuple(pair) for pair in model["merges"]]
        getattr(transformers, name)(vocab=vocab, merges=merges).save_pretrained(folder)

    return make


MADE: dict[str, Callable[[Path], None]] = {
    "byte level": byte_level,
    "a first token": with_bos,
    "a first token that is asked for": asked_for_bos,
    "tokens in the config": with_tokens_in_the_config,
    "tokens found otherwise": found_otherwise,
    "files of old": with_files_of_old,
    "named extras": with_named_extras,
    "extras": with_extras,
    "special tokens as text": that_splits,
    "no config": lambda folder: (byte_level(folder), (folder / "tokenizer_config.json").unlink())[0],
    "TokenizersBackend": lambda folder: (byte_level(folder), set_class(folder, "TokenizersBackend"))[0],
    "PreTrainedTokenizerFast": lambda folder: (byte_level(folder), set_class(folder, "PreTrainedTokenizerFast"))[0],
    "a first token, LlamaTokenizerFast": lambda folder: (with_bos(folder), set_class(folder, "LlamaTokenizerFast"))[0],
    "LlamaTokenizer": of_class("LlamaTokenizer"),
    "Qwen2Tokenizer": of_class("Qwen2Tokenizer"),
    "GPT2Tokenizer": of_class("GPT2Tokenizer"),
}


def set_class(folder: Path, name: str) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class=name)


def both(folder: Path, family: str = "llama") -> tuple[Tokenizer, Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    theirs.backend_tokenizer.no_truncation()
    return Tokenizer.load(folder), theirs


@pytest.mark.parametrize("made", MADE)
def test_a_folder_reads_as_transformers_reads_it(tmp_path: Path, made: str) -> None:
    MADE[made](tmp_path)
    ours, theirs = both(tmp_path, "qwen2" if made.startswith("Qwen") else "llama")
    assert ours._core.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), text
    assert ours.eos_ids == {theirs.eos_token_id} - {None}
    named = {name: token for name, token in theirs.special_tokens_map.items() if token is not None}
    assert dict(ours._special) == named
    special = {i for i, token in theirs.backend_tokenizer.get_added_tokens_decoder().items() if token.special}
    assert ours.special_ids == special


def test_a_tokenizer_json_of_llama_2_is_taken_as_it_is(tmp_path: Path) -> None:
    """transformers 5 builds another one: without the space mark of SentencePiece before a space and behind a mark."""
    hf = llama2_tokenizer()
    hf.save_pretrained(tmp_path)
    set_class(tmp_path, "LlamaTokenizer")
    ours, theirs = both(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == hf.encode(text)
        assert text not in PLAIN or ours.encode(text) == theirs.encode(text)


def test_the_oracle_tells_a_missing_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files_of_old(tmp_path)
    monkeypatch.setattr("triforce.checkpoint.tokenizer_files._missing", lambda *_: ())
    ours, theirs = both(tmp_path)
    assert ours._core.get_vocab() != theirs.get_vocab() and ours.encode(TEXTS[5]) != theirs.encode(TEXTS[5])


def test_without_tokenizer_json_transformers_converts(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template=CHATML)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": 300}))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer.json").unlink()
    set_class(tmp_path, "GPT2Tokenizer")
    ours, theirs = both(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.eos_ids == {theirs.eos_token_id} and ours.template == CHATML


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": 5},
        {"eos_token": {"text": "</s>"}},
        {"eos_token": ["</s>"]},
        {"eos_token": {"content": "</s>", "lstrip": "yes"}},
        {"added_tokens_decoder": {"1": {"content": "x", "lstrip": []}}},
        {"extra_special_tokens": [5]},
        {"added_tokens_decoder": {"one": {"content": "x"}}},
        {"added_tokens_decoder": {"1": {"contents": "x"}}},
        {"added_tokens_decoder": [1]},
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": {"default": 1}},
    ],
)
def test_a_wrong_config_is_no_traceback(tmp_path: Path, config: dict[str, Any]) -> None:
    byte_level(tmp_path)
    edit(tmp_path / "tokenizer_config.json", **config)
    with pytest.raises(ModelError, match=r"tokenizer_config.json"):
        Tokenizer.load(tmp_path)


def test_a_template_is_text(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja cannot be read as text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("value", ["</s>", 1.5, True, {}, [1, None], [[1]]])
def test_ends_are_ids(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id = .*token ids"):
        configured_eos_ids(tmp_path)


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
        {"role": "assistant", "content": None, "tool_calls": CALL},
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
    """What comes out, or that nothing does."""
    try:
        return render()
    except RequestError as error:
        return str(error).partition("messages: ")[2]
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("made", ["byte level", "a first token"])
def test_a_chat_is_that_of_transformers(tmp_path: Path, name: str, made: str) -> None:
    MADE[made](tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    ours, theirs = both(tmp_path)
    good = 0
    for talk in TALKS[:-1]:
        for tools in (None, TOOLS):
            for prompt in (True, False):

                def text(talk: Any = talk, tools: Any = tools, prompt: bool = prompt) -> list[int]:
                    chat = theirs.apply_chat_template(talk, tools, add_generation_prompt=prompt, tokenize=False)
                    return list(theirs.encode(chat, add_special_tokens=False))

                expected = outcome(text)
                assert outcome(lambda: ours.chat(talk, tools, prompt)) == expected  # noqa: B023
                good += isinstance(expected, list)
    assert good >= 4


DIALECTS: dict[str, tuple[str, object]] = {
    "JSON for HTML": ("_to_json", json.dumps),
    "blocks that leave their spaces": (
        "ImmutableSandboxedEnvironment",
        lambda **options: ImmutableSandboxedEnvironment(**(options | {"lstrip_blocks": False})),
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_wrong_dialect_would_show(monkeypatch: pytest.MonkeyPatch, dialect: str) -> None:
    template = "  {% if true %}{{ 'ü'|tojson }}{% endif %}"
    assert chat_template.render(template, {}) == '"ü"'
    monkeypatch.setattr(chat_template, *DIALECTS[dialect])
    chat_template._compiled.cache_clear()
    assert chat_template.render(template, {}) != '"ü"'
    chat_template._compiled.cache_clear()


@pytest.mark.parametrize("files", [True, False])
def test_named_templates(tmp_path: Path, files: bool) -> None:
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
    with pytest.raises(RequestError, match="none called default, only "):
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
def test_templates_stay_in_their_sandbox(tmp_path: Path, template: str) -> None:
    byte_level(tmp_path, chat_template=template)
    with pytest.raises(RequestError, match="chat template does not accept"):
        Tokenizer.load(tmp_path).chat(TALKS[0])


def test_what_is_said_is_plain(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template="{{ messages[0].content.read() }}")
    with pytest.raises(RequestError, match="not JSON serializable"):
        Tokenizer.load(tmp_path).chat([{"role": "user", "content": AddedToken("x")}])
