"""Answers of all families in any chunks: the parts are those of the whole answer, and no surrogate is left."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from triforce.server.answers.answer_format import AnswerFormat
from triforce.server.answers.answer_parts import AnswerPart, Call, Thoughts
from triforce.server.answers.call_format import CallableFunction, CallFormat
from triforce.server.answers.families import FORMATS
from triforce.server.answers.marks import Marks
from triforce.server.answers.thoughts import ThoughtSplitter
from triforce.server.tools import NO_PARAMETERS

SIZE = {"type": "object", "properties": {"of": {"type": "string"}, "cm": {"type": "integer"}}, "required": ["of"]}
FUNCTIONS = [CallableFunction("size", "tools.0", SIZE), CallableFunction("purr", "tools.1", NO_PARAMETERS)]
WORDS = (
    *(
        "size",
        "purr",
        "bark",
        "so",
        " ",
        "\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
        "\\",
        "cat",
        "30",
        "true",
        "NaN",
    ),
    *('{"name": "size", "arguments": {"of": "cat"}}', '{"name": "purr", "parameters": {}}', '"arguments": ', "call:"),
    *("<function=size>", "<parameter=of>", "</parameter>", "</function>", "<", "</", "é", "🙂", "```json\n", "to="),
    *("commentary to=functions.size ", "final", "analysis", "functions.", "\\ud83d", "size{of:", "assistant"),
)
NAMES = [type(form).__name__ for form in FORMATS]


class NamedTokens:
    """A tokenizer in which each mark is a token; every second one is special."""

    special_ids = frozenset(range(0, 100, 2))

    def ids_of_names(self, names: Sequence[str]) -> dict[str, int]:
        return {name: i for i, name in enumerate(names)}


def marks_of(form: CallFormat, has_tokens: bool) -> Marks:
    names = [*form.marks, "<think>", "</think>"]
    tokenizer: Any = NamedTokens()
    return Marks(names, tokenizer) if has_tokens else Marks()


def parts_of(form: CallFormat, marks: Marks, pieces: Sequence[str]) -> tuple[list[AnswerPart], bool]:
    """Return the parts of an answer, neighbouring texts joined, and whether it is cut."""
    splitter = ThoughtSplitter((marks.shown("<think>"), marks.shown("</think>")))
    parser = form.parser(marks, FUNCTIONS, splitter, bare=True, prompt_end="<|start|>assistant")
    parts: list[AnswerPart] = []
    for i, piece in enumerate(pieces, 1):
        for part in parser.add(piece, is_final=i == len(pieces)):
            last_part = parts[-1] if parts else None
            if isinstance(part, str) and isinstance(last_part, str):
                parts[-1] = last_part + part
            elif isinstance(part, Thoughts) and isinstance(last_part, Thoughts):
                parts[-1] = Thoughts(last_part.text + part.text)
            else:
                parts.append(part)
    return parts, parser.is_cut


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_chunks_of_an_answer_give_the_parts_of_the_whole(form: CallFormat, has_tokens: bool) -> None:
    marks = marks_of(form, has_tokens)
    chance = random.Random(len(form.marks) + has_tokens)
    words = [*WORDS, *(marks.shown(mark) for mark in [*form.marks, "<think>", "</think>"] * 4)]
    for _ in range(150):
        text = "".join(chance.choices(words, k=chance.randrange(1, 24)))
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randrange(12))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = parts_of(form, marks, [text])
        assert parts_of(form, marks, pieces) == whole == parts_of(form, marks, list(text)), (text, pieces)
        for part in whole[0]:
            if isinstance(part, Call):
                value = json.loads(part.arguments, parse_constant=pytest.fail)
                assert isinstance(value, dict) and part.arguments.encode()


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": None, "required": True},
        {"properties": {"of": {"type": None}}},
        {"properties": {"of": {"type": [["string"]]}}, "required": "of"},
        {"properties": {"of": True}},
    ],
)
@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_odd_schemas_of_clients_break_no_parser(form: CallFormat, parameters: Any) -> None:
    marks = marks_of(form, True)
    functions = [CallableFunction("size", "tools.0", parameters)]
    texts = (
        "<tool_call>\n<function=size>\n<parameter=of>\nNaN\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>size\n<arg_key>of</arg_key>\n<arg_value>-Infinity</arg_value>",
        '<|tool_call>call:size{of:NaN}<tool_call|><|tool_call>call:size{of:"\\ud83d"}<tool_call|>',
        '<|channel|>commentary to=functions.size<|message|>{"of": "a\nb", "cm": 1e999}<|call|>',
        '[TOOL_CALLS]size[ARGS]{"of": "a\nb", "cm": 1e999}',
    )
    for text in texts:
        parser = form.parser(marks, functions, ThoughtSplitter(), prompt_end="<|start|>assistant")
        for part in parser.add(marks.shown(text), is_final=True):
            if isinstance(part, Call):
                json.loads(part.arguments, parse_constant=pytest.fail)
                assert part.arguments.encode()


@pytest.mark.parametrize("length", [10_000])
@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_long_answers_take_time_in_proportion(form: CallFormat, length: int) -> None:
    """A quadratic parser would exceed the time limit of a test."""
    marks = marks_of(form, True)
    many = [CallableFunction(f"function_{i}", f"tools.{i}", SIZE) for i in range(100)]
    openings = [marks.shown(mark) for mark in form.marks] or [""]
    for repeated in (" ", "[ ", "x <", "}", *openings, f"{openings[0]}<function=size>\n<parameter=", '{"name": '):
        text = openings[0] + repeated * (length // len(repeated))
        for width in (5, len(text)):
            parser = form.parser(marks, [*FUNCTIONS, *many], ThoughtSplitter(), prompt_end="<|start|>assistant")
            for start in range(0, len(text), width):
                parser.add(text[start : start + width], is_final=start + width >= len(text))


def test_attribute_names_the_format_of_a_template() -> None:
    tokenizer: Any = NamedTokens()
    tokenizer.special_ids = frozenset()
    answers = AnswerFormat("<think></think><tool_call><arg_key>", tokenizer)
    assert type(answers.calls).__name__ == "GlmFormat" and answers.has_thoughts
