"""Turns that a chat template gets: a last answer that is continued, and tools told in text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.tokenizer_files import TokenizerFiles
from triforce.errors import RequestError
from triforce.interface.messages import BROKEN_ARGUMENTS, read_messages, told_in_text

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
USER = {"role": "user", "content": "the cat"}
TOOL = {"type": "function", "function": {"name": "purr", "description": "of a cat"}}
CALL = {"id": "c", "type": "function", "function": {"name": "purr", "arguments": '{"loud": true}'}}


def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["the cat"], trainer)
    return Tokenizer(TokenizerFiles(core, {"eos_token": "</s>"}, {"default": template}), frozenset())


def text_of(model: Tokenizer, ids: list[int]) -> str:
    return "".join(map(model.text_of, ids))


@pytest.mark.parametrize("content", ["The", "The ", "  The cat\n", ""])
def test_last_answer_is_continued(content: str) -> None:
    model = tokenizer()
    text = text_of(model, model.chat([USER, {"role": "assistant", "content": content}]))
    assert text == f"<s>user: the cat</s><s>assistant: {content.lstrip()}"


def test_new_turn_begins_on_demand() -> None:
    model = tokenizer()
    turns = [USER, {"role": "assistant", "content": "The"}]
    text = text_of(model, model.chat(turns, continue_final=False))
    assert text == "<s>user: the cat</s><s>assistant: The</s><s>assistant: "


def test_template_that_drops_last_answer_is_refused() -> None:
    dropping = TEMPLATE.replace("in messages", "in messages if m.role == 'user'")
    with pytest.raises(RequestError, match="drops the last turn"):
        tokenizer(dropping).chat([USER, {"role": "assistant", "content": "The"}])


def test_tools_are_told_in_text_where_template_has_none() -> None:
    model = tokenizer()
    turns = [
        USER,
        {"role": "assistant", "content": "so:", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "rrr"},
        {"role": "tool", "tool_call_id": "c", "content": "mrr"},
    ]
    text = text_of(model, model.chat(turns, [TOOL]))
    called = '<tool_call>\n{"name": "purr", "arguments": {"loud": true}}\n</tool_call>'
    assert text.startswith("<s>system: You may call functions.") and json.dumps(TOOL["function"]) in text
    assert f"<s>assistant: so:\n{called}\n{called}</s>" in text
    results = "<tool_response>\nrrr\n</tool_response>\n<tool_response>\nmrr\n</tool_response>"
    assert text.endswith(f"<s>user: {results}</s><s>assistant: ")


def test_functions_join_the_system_turn() -> None:
    turns = read_messages([{"role": "system", "content": "Be brief."}, USER], "")
    told = told_in_text(turns, [TOOL])
    assert [turn["role"] for turn in told] == ["system", "user"] and told[0]["content"].startswith("Be brief.\n\n")
    assert told_in_text(turns, []) == turns


@pytest.mark.parametrize(("arguments", "shown"), [
    ("", {}), (" ", {}), ('{"value": ', {BROKEN_ARGUMENTS: '{"value": '}), ("[1]", {BROKEN_ARGUMENTS: "[1]"}),
    ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}),
])  # fmt: skip
def test_arguments_of_earlier_calls_are_shown(arguments: Any, shown: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "purr", "arguments": arguments}}
    (_, turn) = read_messages([USER, {"role": "assistant", "tool_calls": [call]}], "")
    assert turn["tool_calls"][0]["function"]["arguments"] == shown
