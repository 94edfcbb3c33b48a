"""Calls of Llama 3.1 to 3.3: an answer that is JSON, with the arguments under `parameters`.

Calls of built-in tools stand behind `<|python_tag|>`, and some models put it in front of JSON, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triforce.interface.grammar import Grammar
from triforce.server.answers.answer_parts import AnswerParser, ThinkingParser
from triforce.server.answers.call_format import CallableFunction, JsonCallFormat
from triforce.server.answers.call_parser import CallBlock, CallParser
from triforce.server.answers.json_calls import BareCalls, JsonBlock
from triforce.server.answers.marks import Marks
from triforce.server.answers.thoughts import ThoughtSplitter
from triforce.server.errors import field_error
from triforce.structured_output.compiler import rule_body

PYTHON_TAG = "<|python_tag|>"


class LlamaFormat(JsonCallFormat):
    marks = (PYTHON_TAG,)
    ends = ("<|eom_id|>",)
    arguments_key = "parameters"

    def fits(self, template: str) -> bool:
        return '"parameters": ' in template and "ipython" in template

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        tag = marks.shown(PYTHON_TAG)
        return {tag: lambda: JsonBlock(marks, tag)}

    def parser(
        self,
        marks: Marks,
        functions: Sequence[CallableFunction],
        thoughts: ThoughtSplitter,
        *,
        several: bool = True,
        forced: bool = False,
        bare: bool = False,
        prompt_end: str = "",
    ) -> AnswerParser:
        by_name = {function.name: function for function in functions}
        if not functions:
            return super().parser(marks, functions, thoughts)
        bare_calls = BareCalls(marks, by_name, is_format=True, forced=forced)
        calls = CallParser(self.openings(marks, by_name), bare_calls=bare_calls, several=several, forced=forced)
        return ThinkingParser(thoughts, calls)

    def grammar(
        self, marks: Marks, functions: Sequence[CallableFunction], several: bool, answer: Grammar | None = None
    ) -> Grammar:
        """Return a grammar of one call, as several have no form of their own. With `answer`: one JSON schema of both,
        as two rules that begin alike would exclude each other.
        """
        if answer is None:
            return super().grammar(marks, functions, False)
        rule_body(answer)  # raises for Lark
        if answer.kind != "json_schema":
            raise field_error("tools", "with this model tools go with a JSON schema only; leave out the other format")
        definitions: dict[str, Any] = {}
        schemas: list[Any] = []
        for i, function in enumerate(functions):
            arguments = _with_definitions_of(function.closed_parameters, f"tool{i}_", definitions)
            schemas.append({
                "type": "object",
                "properties": {"name": {"const": function.name}, self.arguments_key: arguments},
                "required": ["name", self.arguments_key],
                "additionalProperties": False,
            })  # fmt: skip
        schemas.append(_with_definitions_of(json.loads(answer.source), "answer_", definitions))
        return Grammar("json_schema", json.dumps({"anyOf": schemas, "$defs": definitions}))


_REFERENCE = re.compile(r"#/(?:\$defs|definitions)/([^/]+)")


def _with_definitions_of(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:
    """Return a schema that refers to definitions of another root, and add its own to them with a prefix."""

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(entry) for entry in part]
        if not isinstance(part, dict):
            return part
        parts = {name: moved(value) for name, value in part.items()}
        reference = parts.get("$ref")
        if isinstance(reference, str):
            parts["$ref"] = _REFERENCE.sub(lambda match: f"#/$defs/{prefix}{match[1]}", reference, count=1)
        return parts

    if not isinstance(schema, dict):
        return schema
    for keyword in ("$defs", "definitions"):
        own = schema.get(keyword)
        definitions.update({prefix + name: moved(part) for name, part in own.items()} if isinstance(own, dict) else {})
    return moved({name: value for name, value in schema.items() if name not in ("$defs", "definitions")})
