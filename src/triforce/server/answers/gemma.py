"""Calls of FunctionGemma and Gemma 4: `call:NAME{key:value}` between marks, with a mark of its own around texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from triforce.server.answers.answer_parts import Call
from triforce.server.answers.call_format import CallableFunction, CallFormat
from triforce.server.answers.call_parser import CallBlock, DelimitedBlock, cut_or_text
from triforce.server.answers.json_calls import NAME, valid_json
from triforce.server.answers.marks import Marks
from triforce.server.answers.written_values import (
    alternatives_of,
    json_of,
    listed_properties,
    listed_values,
    object_of,
    property_schema,
    resolved,
    text_rule,
    types_of,
)
from triforce.structured_output.compiler import schema_grammar

_HEAD = re.compile(r"\s*call:\s*([^\s{]+?)\s*(?={)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_SCALAR = re.compile(r"[^\s,{}\[\]]+")
_SPACE = re.compile(r"\s*")
MAX_LEVELS = 64
"""Maximal nesting of arguments."""


class GemmaFormat(CallFormat):
    """The format of Gemma 4. quote: mark around a text."""

    opening = "<|tool_call>"
    closing = "<tool_call|>"
    quote = '<|"|>'
    marks = ("<|tool_call>", "<tool_call|>", '<|"|>')
    ends = ("<|tool_response>",)
    list_texts = ("", "", "")

    def fits(self, template: str) -> bool:
        return self.opening in template

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        opening = marks.shown(self.opening)
        calls_in = partial(_calls_in, marks, marks.shown(self.quote), functions)
        return {opening: lambda: DelimitedBlock(opening, marks.shown(self.closing), calls_in)}

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        """Return the rules of a call. Its arguments come in the order of the alphabet, as the template writes them."""
        rules = _Rules(marks, self.quote, index)
        body = rules.members(function.closed_parameters)
        head = marks.terms(f"{self.opening}call:{function.name}{{")
        return [f"call_{index}: {head} {body} {marks.terms('}' + self.closing)}", *rules.lines]


class FunctionGemmaFormat(GemmaFormat):
    opening = "<start_function_call>"
    closing = "<end_function_call>"
    quote = "<escape>"
    marks = ("<start_function_call>", "<end_function_call>", "<escape>")
    ends = ("<start_function_response>",)


class _Rules:
    """Rules of the values of one call. index: of its function."""

    def __init__(self, marks: Marks, quote: str, index: int) -> None:
        self.lines: list[str] = []
        self._marks = marks
        self._quote = quote
        self._index = index

    def members(self, schema: Mapping[str, Any], level: int = 0) -> str:
        """Return the terms of an object's members, without its braces. Raises ValueError or RecursionError."""
        if level > MAX_LEVELS:
            raise RecursionError
        listed = sorted(listed_properties(schema).items())
        required = [name for name, (_, is_required) in listed if is_required]
        if not listed:
            return ""
        if not required:  # a comma stands between two members, so one of them must come first
            firsts = [self._following(listed[i:], level) for i in range(len(listed))]
            return f"({' | '.join(firsts)})?"
        split = next(i for i, (name, _) in enumerate(listed) if name == required[0])
        leading = [f'({self._member(*member, level)} ",")?' for member in listed[:split]]
        return " ".join([*leading, self._following(listed[split:], level)])

    def _following(self, listed: list[tuple[str, tuple[dict[str, Any], bool]]], level: int) -> str:
        """Return the first member, and the others behind commas."""
        terms = [self._member(*listed[0], level)]
        for name, (schema, is_required) in listed[1:]:
            member = f'"," {self._member(name, (schema, is_required), level)}'
            terms.append(member if is_required else f"({member})?")
        return f"({' '.join(terms)})"

    def _member(self, name: str, described: tuple[dict[str, Any], bool], level: int) -> str:
        return f"{self._marks.terms(name + ':')} {self._value(name, described[0], level)}"

    def _value(self, name: str, schema: dict[str, Any], level: int) -> str:
        if level > MAX_LEVELS:
            raise RecursionError
        definitions = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
        if alternatives := alternatives_of(schema):
            parts = [resolved(part, schema) for part in alternatives]
            schemas = [(part if isinstance(part, dict) else {}) | definitions for part in parts]
            return f"({' | '.join(self._value(name, part, level + 1) for part in schemas)})"
        types = types_of(schema)
        if types == {"object"} and schema.get("properties"):
            return f'"{{" {self.members(schema, level + 1)} "}}"'
        if types == {"array"} and isinstance(schema.get("items"), dict):
            items = resolved(schema["items"], schema)
            item = self._value(name, (items if isinstance(items, dict) else {}) | definitions, level + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if types & {"object", "array"}:
            raise ValueError(f"the form of {name!r} is not supported, as this model writes objects without quotes")
        rules = []
        if "string" in types:
            rules.append(self._text(name, schema))
        if other_types := types - {"string"}:
            values = listed_values(schema)
            scalars = None if values is None else [value for value in values if not isinstance(value, str)]
            constraints = schema if scalars is None else {"enum": scalars}
            rules.append(self._rule("value", schema_grammar(constraints | {"type": sorted(other_types)})))
        return f"({' | '.join(rules)})"

    def _text(self, name: str, schema: dict[str, Any]) -> str:
        values = listed_values(schema)
        quote = self._marks.terms(self._quote)
        if values is not None:
            texts = [json.dumps(value, ensure_ascii=False) for value in values if isinstance(value, str)]
            return f"{quote} ({' | '.join(texts)}) {quote}"
        unsupported = {"pattern", "format", "minLength", "maxLength"} & schema.keys()
        if unsupported:
            reason = "as this model writes texts without quotes"
            raise ValueError(f"{min(unsupported)!r} of {name!r} is not supported, {reason}")
        rule = f"text_{self._index}_{len(self.lines)}"
        self.lines.append(text_rule(rule, self._marks, self._quote))
        return f"{quote} {rule}"

    def _rule(self, kind: str, body: str) -> str:
        name = f"{kind}_{self._index}_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _calls_in(
    marks: Marks, quote: str, functions: Mapping[str, CallableFunction], body: str, is_closed: bool
) -> list[Call] | None:
    """Return the call between the marks, see `DelimitedBlock`."""
    head = _HEAD.match(body)
    if head is None or not NAME.fullmatch(head[1]):
        return cut_or_text(body, "call:", is_closed)
    name = head[1]
    try:
        arguments = _Reader(marks, quote, body, head.end()).object(
            functions[name].parameters if name in functions else {}
        )
    except (ValueError, RecursionError):
        return []
    return [Call(name, arguments)]


class _Reader:
    """Reads arguments from a place of a text on, and returns them as JSON. Methods raise ValueError for other text."""

    def __init__(self, marks: Marks, quote: str, text: str, place: int) -> None:
        self._marks = marks
        self._quote = quote
        self._text = text
        self._place = place
        self._level = 0

    def object(self, schema: Any) -> str:
        members: dict[str, str] = {}
        for _ in self._items("{", "}"):
            name = self._key()
            members[name] = self._value(property_schema(schema, name))
        return object_of(members)

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Go to each item of a list between two characters, with commas between them."""
        self._level += 1
        if self._level > MAX_LEVELS:
            raise ValueError("too many levels")
        self._require(opening)
        while not self._skip(closing):
            yield
            if not self._skip(","):
                self._require(closing)
                break
        self._level -= 1

    def _key(self) -> str:
        if (quoted := self._quoted()) is not None:
            self._require(":")
            return quoted
        key = _KEY.match(self._text, self._place)
        if key is None:
            raise ValueError("a member has no name")
        self._place = key.end()
        return self._marks.restored(key[1]).strip('"')

    def _value(self, schema: Any) -> str:
        if (quoted := self._quoted()) is not None:
            return json_of(quoted, schema)
        next_character = self._text[self._place : self._place + 1]
        if next_character == "{":
            return self.object(schema)
        if next_character == "[":
            items = schema.get("items") if isinstance(schema, dict) else None
            return "[" + ", ".join([self._value(items) for _ in self._items("[", "]")]) + "]"
        if next_character == '"':
            start = self._place
            _, self._place = json.JSONDecoder(strict=False).raw_decode(self._text, start)
            return valid_json(self._marks.restored_json(self._text[start : self._place]))
        scalar = _SCALAR.match(self._text, self._place)
        if scalar is None:
            raise ValueError("a value is missing")
        self._place = scalar.end()
        return json_of(self._marks.restored(scalar[0]), schema)

    def _quoted(self) -> str | None:
        """Return the text between the next two quotes, or None if no quote follows."""
        if not self._skip(self._quote):
            return None
        end = self._text.index(self._quote, self._place)
        text = self._text[self._place : end]
        self._place = end + len(self._quote)
        return self._marks.restored(text)

    def _require(self, expected: str) -> None:
        if not self._skip(expected):
            raise ValueError(f"{expected} is missing")

    def _skip(self, expected: str) -> bool:
        """Skip white space, and `expected` if it follows. Returns whether it does."""
        match = _SPACE.match(self._text, self._place)
        self._place = match.end() if match else self._place
        if not self._text.startswith(expected, self._place):
            return False
        self._place += len(expected)
        return True
