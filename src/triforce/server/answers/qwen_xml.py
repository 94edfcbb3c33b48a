"""Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: a function and its parameters as tags with their names.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from triforce.interface.messages import CALL_CLOSE, CALL_OPEN
from triforce.server.answers.answer_parts import Call
from triforce.server.answers.call_format import CallableFunction, CallFormat
from triforce.server.answers.call_parser import CallBlock, DelimitedBlock, cut_or_text
from triforce.server.answers.json_calls import NAME
from triforce.server.answers.marks import Marks
from triforce.server.answers.written_values import argument_rules, json_of, object_of, property_schema

FUNCTION_CLOSE = "</function>"
_FUNCTION = re.compile(r"\s*<function=([^>]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|$))", re.DOTALL)
_END = re.compile(r"\s*</function>\s*|\s*$")


class QwenXmlFormat(CallFormat):
    marks = (CALL_OPEN, CALL_CLOSE)
    closing = CALL_CLOSE

    def fits(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        """Return the blocks; a model may leave out the outer mark, and then goes on with it behind the call."""
        calls_in = partial(_calls_in, marks, functions)
        opening = marks.shown(CALL_OPEN)
        blocks = {opening: lambda: DelimitedBlock(opening, marks.shown(CALL_CLOSE), calls_in)}
        for name in functions:
            head = f"<function={name}>"
            blocks[head] = partial(DelimitedBlock, "", FUNCTION_CLOSE, calls_in)
        return {**blocks}

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        arguments, rules = argument_rules(
            marks, function, index, lambda name: f"<parameter={name}>\n", "\n</parameter>\n"
        )
        head = marks.terms(f"{CALL_OPEN}\n<function={function.name}>\n")
        tail = marks.terms(f"{FUNCTION_CLOSE}\n{CALL_CLOSE}")
        return [f"call_{index}: {head} {arguments} {tail}", *rules]


def _calls_in(marks: Marks, functions: Mapping[str, CallableFunction], body: str, is_closed: bool) -> list[Call] | None:
    """Return the calls between the marks, see `DelimitedBlock`."""
    calls = []
    place = 0
    while head := _FUNCTION.match(body, place):
        name = head[1].strip()
        if not NAME.fullmatch(name):
            return None
        schema = functions[name].parameters if name in functions else {}
        members: dict[str, str] = {}
        place = head.end()
        while parameter := _PARAMETER.match(body, place):
            key = marks.restored(parameter[1].strip())
            members[key] = json_of(marks.restored(parameter[2]), property_schema(schema, key))
            place = parameter.end()
        end = _END.match(body, place)
        if end is None or (not is_closed and not end[0].strip()):
            break
        calls.append(Call(name, object_of(members)))
        place = end.end()
    return calls if calls or _FUNCTION.match(body) else cut_or_text(body, "<function=", is_closed)
