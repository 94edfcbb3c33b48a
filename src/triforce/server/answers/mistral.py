"""Calls of Mistral models behind `[TOOL_CALLS]`.

Up to tokenizer version 7 a list in JSON follows. From version 11 on each call has a mark of its own: the function's
name, `[ARGS]` and the arguments, in version 11 with `[CALL_ID]` and an id between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from triforce.engine.engine import partial_match
from triforce.server.answers.answer_parts import Call
from triforce.server.answers.call_format import CallableFunction, JsonCallFormat
from triforce.server.answers.call_parser import BlockEnd, CallBlock
from triforce.server.answers.json_calls import NAME, JsonBlock, ObjectEnd, read_arguments
from triforce.server.answers.marks import Marks
from triforce.structured_output.compiler import schema_grammar

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
SURROGATES = "\ud800-\udfff"
MAX_HEAD = 160
"""Characters of a function's name and an id, with the white space around them."""


class MistralFormat(JsonCallFormat):
    marks = (TOOL_CALLS,)
    opening = TOOL_CALLS
    list_texts = (f"{TOOL_CALLS} [", "]", ", ")

    def fits(self, template: str) -> bool:
        return TOOL_CALLS in template and ARGS not in template


class NamedMistralFormat(JsonCallFormat):
    """The format from tokenizer version 11 on."""

    marks = (TOOL_CALLS, ARGS, CALL_ID)
    opening = TOOL_CALLS
    list_texts = ("", "", "")

    def fits(self, template: str) -> bool:
        return TOOL_CALLS in template and ARGS in template

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        opening = marks.shown(TOOL_CALLS)
        return {opening: lambda: NamedBlock(marks, opening)}

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        head = marks.terms(f"{TOOL_CALLS}{function.name}{ARGS}")
        return [
            f"call_{index}: {head} arguments_{index}",
            f"arguments_{index}: {schema_grammar(function.closed_parameters)}",
        ]


class NamedBlock:
    """A call whose name stands in front of its arguments; JSON as in the older format is read, too."""

    def __init__(self, marks: Marks, opening: str) -> None:
        self._marks = marks
        self._opening = opening
        self._older = JsonBlock(marks, opening)
        self._object: ObjectEnd | None = None
        self._name = ""
        self._start = 0
        self._inner_marks = [marks.shown(ARGS), marks.shown(CALL_ID)]
        name = rf"\s*([^\s{{\[\]{SURROGATES}]{{1,128}})\s*"
        call_id = rf"{re.escape(marks.shown(CALL_ID))}\s*\w*\s*"
        arguments = rf"{re.escape(marks.shown(ARGS))}\s*"
        self._head = re.compile(rf"{name}(?:{call_id})?{arguments}(?={{)")
        self._head_beginning = re.compile(rf"\s*(?:{name}(?:{call_id})?(?:{arguments})?)?")

    def read(self, text: str, is_final: bool) -> BlockEnd | None:
        begin = len(self._opening)
        if self._object is None:
            match = self._head.match(text, begin)
            if match is None or not NAME.fullmatch(match[1]):
                start = text[begin:].lstrip()[:1]
                if start in ("[", "{"):
                    return self._older.read(text, is_final)
                certain_end = len(text) - partial_match(text[begin:], self._inner_marks)
                if len(text) > begin + MAX_HEAD or not self._head_beginning.fullmatch(text, begin, certain_end):
                    return BlockEnd([], begin)
                return BlockEnd([], len(text), is_cut=True) if is_final else None
            self._name = match[1]
            self._start = match.end()
            self._object = ObjectEnd(self._start)
        end = self._object.find(text)
        if end is None:
            return BlockEnd([], len(text), is_cut=True) if is_final else None
        raw = self._marks.restored_json(text[self._start : end])
        arguments = read_arguments(raw)
        return BlockEnd([raw if arguments is None else Call(self._name, arguments)], end)
