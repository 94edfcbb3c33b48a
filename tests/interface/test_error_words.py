"""Errors name an argument once, and each door words it as its user writes it."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from scripts.docs_reference import commands
from triforce import LLM, RequestError, SamplingParams
from triforce.errors import OPTIONS, argument, as_option, error_prefix, format_arguments, use_argument_format
from triforce.server.errors import FIELDS, as_field, refusal_for

SOURCE = Path(__file__).parents[2] / "src" / "triforce"
CALLED = {
    name for method in (LLM.__init__, LLM.generate, LLM.chat, LLM.open) for name in inspect.signature(method).parameters
}
ARGUMENTS = CALLED | {field.name for field in fields(SamplingParams)}
IN_PYTHON_ALONE = {"messages", "tools", "params", "prompts", "trace"}
"""Arguments that no command takes."""


def named_in_source() -> set[str]:
    calls = [
        node
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "argument"
    ]
    return {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}


def test_errors_name_arguments_that_exist() -> None:
    assert len(named_in_source()) > 20
    assert not named_in_source() - ARGUMENTS


def test_options_in_errors_are_those_of_commands() -> None:
    command_options = commands()
    words = " ".join(as_option(name, None) for name in (named_in_source() | OPTIONS.keys()) - IN_PYTHON_ALONE)
    assert not {option for option in re.findall(r"--[\w-]+", words) if f"`{option}`" not in command_options}


@pytest.mark.parametrize(
    ("marked", "keyword", "option", "field"),
    [
        (argument("context", 64), "context=64", "--context 64", "--context 64 of the server"),
        (argument("draft", None), "draft=None", "--draft none", "--draft none of the server"),
        (argument("strict", True), "strict=True", "--strict", "--strict of the server"),
        (argument("kv_offload", "host"), "kv_offload='host'", "--kv-offload host", "--kv-offload host of the server"),
        (argument("ranks"), "ranks", "--tp", "--tp of the server"),
        (argument("top_p"), "top_p", "--top-p", "top_p"),
        (argument("mode", "retrieval"), "mode='retrieval'", "--mode retrieval", 'mode: "retrieval"'),
    ],
)
def test_arguments_are_worded_at_each_door(marked: str, keyword: str, option: str, field: str) -> None:
    error = RequestError(f"use {marked}, say")
    assert str(error) == f"use {keyword}, say" and format_arguments(marked) == keyword
    assert repr(error) == f"RequestError({str(error)!r})"
    assert error.message_text(as_option) == f"use {option}, say"
    assert error.message_text(as_field) == f"use {field}, say"
    with use_argument_format(as_option):
        assert str(error) == f"use {option}, say"
    assert str(error) == f"use {keyword}, say"


def test_refusal_of_server_names_field_as_param() -> None:
    with pytest.raises(RequestError) as error, error_prefix("choice 2"):
        SamplingParams(top_p=0)
    refusal = refusal_for(error.value)
    assert refusal and refusal.param == "top_p" and "top_p" in FIELDS
    assert refusal.message.startswith("choice 2: top_p must be above 0")
