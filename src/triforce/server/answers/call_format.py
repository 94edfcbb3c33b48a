"""Formats of calls: how the models of a family write the call of a function, and the grammar of such texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triforce.interface.grammar import MAX_CHARACTERS, NAMED_SCHEMAS, NESTED_SCHEMAS, Grammar, closed_objects
from triforce.server.answers.answer_parts import AnswerParser, ThinkingParser
from triforce.server.answers.call_parser import CallBlock, CallParser
from triforce.server.answers.json_calls import BareCalls, JsonBlock
from triforce.server.answers.marks import Marks
from triforce.server.answers.thoughts import ThoughtSplitter
from triforce.server.errors import ApiError, field_error
from triforce.structured_output.compiler import rule_body, schema_grammar

_MAPS_OF_SCHEMAS = NAMED_SCHEMAS | {"$defs", "definitions"}
_NOTES = {"$comment", "default", "deprecated", "description", "examples", "title"}
_RULE_INDEX = re.compile(r"[a-z]+_(\d+)[_:\[]")


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that an answer may call.

    place: of its parameters in the request's body. parameters: JSON schema of an object.
    """

    name: str
    place: str
    parameters: dict[str, Any]

    @property
    def closed_parameters(self) -> dict[str, Any]:
        """The schema of an object without other properties than those listed. Raises RecursionError."""
        closed: dict[str, Any] = without_notes(closed_objects(self.parameters))
        return closed | {"type": "object"}


def without_notes(schema: Any) -> Any:
    """Return a schema without texts for people, which no grammar needs and which make it long."""
    if isinstance(schema, list):
        return [without_notes(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {}
    for keyword, value in schema.items():
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            parts[keyword] = {name: without_notes(part) for name, part in value.items()}
        elif keyword in NESTED_SCHEMAS:
            parts[keyword] = without_notes(value)
        elif keyword not in _NOTES:
            parts[keyword] = value
    return parts


def unusable_parameters(function: CallableFunction, reason: str) -> ApiError:
    """Return the error of parameters that cannot be compiled to a grammar."""
    text = f"the parameters of {function.name} cannot be enforced: {reason}; change or simplify them"
    return field_error(function.place, text)


class CallFormat:
    """Format of one family. Texts of a format may contain its marks, see `Marks.shown` and `Marks.terms`."""

    marks: Sequence[str] = ()
    """Texts that are single tokens in the vocabularies of the family."""
    ends: Sequence[str] = ()
    """Tokens that end an answer, beside the model's own."""
    closing = ""
    """Mark behind a call; empty for a format without one."""
    answer_opening = ""
    """Text in front of an answer that is no call, which a constrained answer gets as a part of its prompt."""
    list_texts = ("", "", "\n")
    """Texts in front of all calls, behind them and between them, where an answer has several."""

    def fits(self, template: str) -> bool:
        """Whether models with this chat template write calls in this format."""
        raise NotImplementedError

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        """Return the block behind each mark, as an answer shows it. functions: by name."""
        raise NotImplementedError

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        """Return the rules of a call in Lark, the first one named `call_INDEX`. Raises ValueError or RecursionError."""
        raise NotImplementedError

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
        """Return a parser for one answer. Without functions all of it is thoughts and text.

        several: whether text and calls may follow a call. forced: whether the answer consists of calls. bare: whether
        an answer that consists of the JSON of a call is a call, too. prompt_end: the last characters of the prompt.
        """
        by_name = {function.name: function for function in functions}
        openings = self.openings(marks, by_name) if functions else {}
        own_tokens = {shown for mark in self.marks if (shown := marks.shown(mark)) != mark}
        closings = {*own_tokens, marks.shown(self.closing)} - {"", *openings} if functions else set()
        bare_calls = BareCalls(marks, by_name, is_format=False) if bare and functions else None
        calls = CallParser(openings, closings, bare_calls=bare_calls, several=several, forced=forced)
        return ThinkingParser(thoughts, calls)

    def grammar(
        self, marks: Marks, functions: Sequence[CallableFunction], several: bool, answer: Grammar | None = None
    ) -> Grammar:
        """Return a grammar of texts that are calls. Raises ApiError that names the faulty parameters.

        several: whether there may be several calls. answer: grammar of other texts that are allowed, too.
        """
        list_opening, list_closing, separator = self.list_texts
        further_calls = f"({marks.terms(separator)} call)*" if several else ""
        calls = " ".join(
            part for part in (marks.terms(list_opening), "call", further_calls, marks.terms(list_closing)) if part
        )
        rules = [f"start: {calls} | answer" if answer else f"start: {calls}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            try:
                rules += self.rules_of_call(marks, function, i)
            except RecursionError as error:
                raise unusable_parameters(function, "they are nested too deeply") from error
            except ValueError as error:
                raise unusable_parameters(function, str(error)) from error
        if answer:
            rules.append(f"answer: {rule_body(answer)}")
        return grammar_of_rules(rules, marks)


class JsonCallFormat(CallFormat):
    """A format of calls in JSON: an object with the name of a function, and its arguments under `arguments_key`.

    opening, closing: marks around one call, or the calls of an answer.
    """

    opening = ""
    arguments_key = "arguments"
    json_texts = ('{"name": ', "}")
    """Texts in front of the name of a function and behind its arguments."""

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        opening = marks.shown(self.opening.strip())
        return {opening: lambda: JsonBlock(marks, opening, marks.shown(self.closing))}

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        call_opening, call_closing = self.json_texts
        head = f'{call_opening}{json.dumps(function.name)}, "{self.arguments_key}": '
        call = f"call_{index}: {marks.terms(head)} arguments_{index} {marks.terms(call_closing)}"
        return [call, f"arguments_{index}: {schema_grammar(function.closed_parameters)}"]


def grammar_of_rules(rules: Sequence[str], marks: Marks) -> Grammar:
    """Return a grammar in Lark. Raises ApiError if it is too long."""
    source = "\n".join(rules)
    if len(source) > MAX_CHARACTERS:
        raise field_error(
            "tools",
            f"the tools together are too long ({len(source)} characters of a grammar; the "
            f"maximum is {MAX_CHARACTERS}); send fewer, or simplify their parameters",
        )
    return Grammar("lark", source, marks.token_ids)


def function_at(source: str, line: int) -> int | None:
    """Return the index of the function whose rule stands in a line of a grammar, counted from 1; None for another."""
    lines = source.splitlines()
    match = _RULE_INDEX.match(lines[line - 1]) if 0 < line <= len(lines) else None
    return int(match[1]) if match else None
