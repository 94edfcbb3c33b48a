"""Calls of GLM 4.5 to 4.7: a function's name, and its arguments as pairs of `<arg_key>` and `<arg_value>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from triforce.server.answers.answer_parts import Call
from triforce.server.answers.call_format import CallableFunction, CallFormat
from triforce.server.answers.call_parser import CallBlock, DelimitedBlock
from triforce.server.answers.json_calls import NAME
from triforce.server.answers.marks import Marks
from triforce.server.answers.written_values import argument_rules, json_of, object_of, property_schema, required_names

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmFormat(CallFormat):
    marks = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    ends = ("<|observation|>", "<|user|>")
    closing = CLOSE

    def fits(self, template: str) -> bool:
        return KEY in template and OPEN in template

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        opening = marks.shown(OPEN)
        return {opening: lambda: DelimitedBlock(opening, marks.shown(CLOSE), partial(_calls_in, marks, functions))}

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        arguments, rules = argument_rules(
            marks, function, index, lambda name: f"{KEY}{name}{KEY_END}\n{VALUE}", f"{VALUE_END}\n"
        )
        head = marks.terms(f"{OPEN}{function.name}\n")
        return [f"call_{index}: {head} {arguments} {marks.terms(CLOSE)}", *rules]


def _calls_in(marks: Marks, functions: Mapping[str, CallableFunction], body: str, is_closed: bool) -> list[Call] | None:
    """Return the call between the marks, see `DelimitedBlock`. Without its end it must have all required arguments."""
    key, key_end, value, value_end = map(marks.shown, (KEY, KEY_END, VALUE, VALUE_END))
    name_text, first_key, pairs_text = body.partition(key)
    name = name_text.strip()
    if not NAME.fullmatch(name):
        return [] if not name and not is_closed else None
    schema = functions[name].parameters if name in functions else {}
    pair = re.compile(rf"(.*?){re.escape(key_end)}\s*{re.escape(value)}(.*?){re.escape(value_end)}\s*", re.DOTALL)
    members: dict[str, str] = {}
    for part in pairs_text.split(key) if first_key else []:
        match = pair.fullmatch(part)
        if match is None:
            return []
        argument = marks.restored(match[1].strip())
        members[argument] = json_of(marks.restored(match[2]), property_schema(schema, argument))
    has_end = is_closed or bool(members) or name_text[-1:].isspace()
    if not has_end or (not is_closed and required_names(schema) - members.keys()):
        return []
    return [Call(name, object_of(members))]
