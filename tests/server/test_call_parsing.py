"""Calls in the text of answers: found in any pieces, in the model's own characters, and never as markup."""

from __future__ import annotations

import json

import pytest

from triforce.server.answers.answer_parts import Call
from triforce.server.answers.call_parser import CallParser
from triforce.server.answers.json_calls import BareCalls, JsonBlock, read_call
from triforce.server.answers.marks import Marks

NAMES = {"size", "purr"}
A = Call("size", '{"of": "cat"}')
B = Call("purr", "{}")
CALL = '<tool_call>{"name": "purr", "arguments": {}}</tool_call>'
TAGGED: list[tuple[str, list[str | Call]]] = [
    ('<tool_call>\n{"name": "size", "arguments": {"of": "cat"}}\n</tool_call>', [A]),
    (f'so:\n{CALL}\n<tool_call>\n{{"name": "size", "arguments": {{"of": "cat"}}}}\n</tool_call>\n', ["so:", B, A]),
    ("a < b <tool and more  ", ["a < b <tool and more  "]),
    ('<tool_call>{"name": "bark", "arguments": {}}</tool_call> x', [Call("bark", "{}"), " x"]),
    ('<tool_call>{"name": "purr", "argu', []),
    ("<tool_call>", []),
    ('<tool_call>{"name": "purr", "arguments": NaN}</tool_call>', ['{"name": "purr", "arguments": NaN}']),
    ("<tool_call>see there</tool_call> and more", ["see there and more"]),
    ("<tool_call></tool_call>nothing", ["nothing"]),
    ('<tool_call>{"name": "purr", "arguments": {}}', [B]),
    ('<tool_call>{"name": "purr", "arguments": {}}</tool_', [B]),
    ('<tool_call>{"name": "size", "arguments": {"of": "see </tool_call> tag"}}</tool_call>',
     [Call("size", '{"of": "see </tool_call> tag"}')]),
    ('<tool_call>{"name": "size", "arguments": {"of": "\\ud83d", "n":1.50}}</tool_call>',
     [Call("size", '{"of": "\\ud83d", "n":1.50}')]),
    ('<tool_call>{"name": "size", "arguments": {"of": "a \\" b }{"}}</tool_call>',
     [Call("size", '{"of": "a \\" b }{"}')]),
    ('<tool_call>{"name": "size", "parameters": {"of": "cat"}}</tool_call>', [A]),
    ('<tool_call>{"name": "purr"}</tool_call>', [B]),
    ('<tool_call>{"name": "size", "arguments": "{\\"of\\": \\"cat\\"}"}</tool_call>', [A]),
    ('<tool_call>{"arguments": {"of": "cat"}, "name": "size"}</tool_call>', [A]),
    ('<tool_call>\n{"name": "purr", "arguments": {}}}\n</tool_call>', [B]),
    ('<tool_call>{"name": "purr", "arguments": {}}\n{"name": "purr", "arguments": null}</tool_call>', [B, B]),
    (f"<tool_call>{CALL}</tool_call>", [B]),
    ("<tool_call>x</tool_call>y</tool_call>", ["xy"]),
]  # fmt: skip
BARE: list[tuple[str, list[str | Call]]] = [
    (' {"name": "size", "parameters": {"of": "cat"}}', [A]),
    ('{"name": "size", "arguments": {"of": "cat"}}\n', [A]),
    ('```json\n{"name": "size", "arguments": {"of": "cat"}}\n```', [A]),
    ('{"type": "function", "name": "purr", "parameters": ""}', [B]),
    ('no: {"name": "purr", "parameters": {}}', ['no: {"name": "purr", "parameters": {}}']),
    ('{"name": "purr", "arguments": {}} as said', ['{"name": "purr", "arguments": {}} as said']),
    ('{"name": "bark", "arguments": {}}', ['{"name": "bark", "arguments": {}}']),
    ('{"name": "purr", "arguments": ', []),
    ('{"name": "bark", "arguments": ', ['{"name": "bark", "arguments": ']),
    ("```json\n[1]\n```", ["```json\n[1]\n```"]),
    ("{" * 2000, ["{" * 2000]),
    ("  ", ["  "]),
]


def call_parser(*, marked: bool, bare: bool, several: bool, forced: bool = False) -> CallParser:
    """Return a parser of JSON between tags, or of whole answers, or of both."""
    marks = Marks()
    openings = {"<tool_call>": lambda: JsonBlock(marks, "<tool_call>", "</tool_call>")} if marked else {}
    closings = ["</tool_call>"] if marked else []
    bare_calls = BareCalls(marks, NAMES, is_format=not marked, forced=forced) if bare else None
    return CallParser(openings, closings, bare_calls=bare_calls, several=several, forced=forced)


def parsed(parser: CallParser, text: str, width: int) -> list[str | Call]:
    """Return the parts of a text that comes in pieces; neighbouring texts are joined."""
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    parts: list[str | Call] = []
    for i, piece in enumerate(pieces, 1):
        for part in parser.add(piece, is_final=i == len(pieces)):
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
    return parts


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("text", "expected"), TAGGED)
def test_marked_calls_are_found_in_any_pieces(text: str, expected: list[str | Call], bare: bool, width: int) -> None:
    parser = call_parser(marked=True, bare=bare, several=True)
    parts = parsed(parser, text, width)
    assert parts == expected
    assert all(isinstance(json.loads(part.arguments), dict) for part in parts if isinstance(part, Call))


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("text", "expected"), BARE)
def test_bare_calls_are_whole_answers(text: str, expected: list[str | Call], marked: bool, width: int) -> None:
    assert parsed(call_parser(marked=marked, bare=True, several=True), text, width) == expected


@pytest.mark.parametrize(("marked", "bare"), [(True, True), (True, False), (False, True)])
def test_empty_last_piece_loses_no_call(marked: bool, bare: bool) -> None:
    parser = call_parser(marked=marked, bare=bare, several=True)
    text = CALL if marked else '{"name": "purr", "arguments": {}}'
    assert [*parser.add(text, is_final=False), *parser.add("", is_final=True)] == [B]


@pytest.mark.parametrize("text", ['{"name": "bark"', "{}", "Hello", "[1", "```python\n", '{"names": ["size"]'])
def test_text_that_can_be_no_call_is_not_held_back(text: str) -> None:
    parser = call_parser(marked=True, bare=True, several=True)
    assert "".join(map(str, parser.add(text, is_final=False))) == text.rstrip()


@pytest.mark.parametrize("forced", ['{"name": "size", "argu', '{"name": "size", "arguments": {"of": "ca'])
def test_forced_call_that_is_cut_leaves_nothing(forced: str) -> None:
    for marked in (True, False):
        text = f"<tool_call>\n{forced}" if marked else forced
        parser = call_parser(marked=marked, bare=not marked, several=False, forced=True)
        assert parser.add(text, is_final=True) == [] and parser.is_cut


def test_answer_of_one_call_ends_behind_it() -> None:
    parser = call_parser(marked=True, bare=False, several=False)
    assert parser.add(f"so: {CALL} {CALL} and more", is_final=True) == ["so:", B]


@pytest.mark.parametrize("text", [
    "{}", '{"name": 5}', '{"name": "a b", "arguments": {}}', '{"name": "f", "arguments": []}',
    '{"name": "f", "arguments": "text"}', '{"name": "f" "arguments": {}}', '{"name": "f", "arguments": {}} x',
    '{name: "f"}', '{"name": "f", }', "{" * 3000,
])  # fmt: skip
def test_text_that_is_no_call_is_refused(text: str) -> None:
    assert read_call(text) is None


def test_line_ends_inside_strings_are_escaped() -> None:
    call = read_call('{"name": "f", "arguments": {"text": "a\nb"}}')
    assert call and json.loads(call.arguments) == {"text": "a\nb"} and "\n" not in call.arguments


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ('{"a": 1e999, "b": [1.5, -1e999]}', {"a": "1e999", "b": [1.5, "-1e999"]}),
        ('{"a": ' + "[" * 120 + "]" * 120 + "}", None),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "arguments"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "arguments"),
    ],
    ids=["numbers", "depth", "too deep", "far too deep"],
)
def test_values_of_a_call_can_be_sent_and_sent_back(written: str, values: object) -> None:
    """Some doors send arguments as an object, which holds neither infinite numbers nor any depth."""
    read = Call("size", written).values()
    json.dumps(read, allow_nan=False)
    if values == "arguments":
        assert read == {"arguments": written}
    else:
        assert read == (values or json.loads(written))
