"""Tools of one request: which are shown to the model, and what its answer is held to and read by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triforce.interface.grammar import Grammar
from triforce.server.errors import wrong
from triforce.server.tool_call_parser import CallFormat, CallReader, Plain, call_format
from triforce.server.tool_schemas import Function, FunctionName, ToolRequest


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Of one request. With `forced` an answer is calls and nothing else; without, the model is free to call."""

    form: CallFormat
    tools: Sequence[Function]
    forced: Grammar | None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        told = ("name", "description", "parameters")
        functions = [{key: getattr(tool, key) for key in told} for tool in self.tools]
        return [
            {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
            for function in functions
        ]

    def reader(self) -> CallReader:
        """For one answer."""
        return self.form.reader({tool.name for tool in self.tools})


def reader_of(tools: ToolChoice | None) -> CallReader:
    """For one answer, whether it may call or not."""
    return tools.reader() if tools else Plain()


def toolbox(wanted: ToolRequest, template: str) -> ToolChoice | None:
    """The tools that may be called; None if there are none. Raises Refusal or RequestError."""
    form, choice = call_format(template), wanted.choice or "auto"
    if form is None and (wanted.functions or wanted.spoken):
        raise wrong("tools", "this model's chat template has no calls of tools that can be read here (as Llama 3 or "
                    "Qwen write them); leave them out")  # fmt: skip
    if choice not in ("none", "auto") and not wanted.functions:
        raise wrong("tool_choice", "tool_choice needs tools to choose from")
    if form is None or not wanted.functions or choice == "none":
        return None
    if wanted.held:
        raise wrong(wanted.held, f"an answer is held to {wanted.held} or may call tools; send one of them, or "
                    'tool_choice: "none"')  # fmt: skip
    functions = {function.name: function.parameters for function in wanted.functions}
    if len(functions) < len(wanted.functions):
        raise wrong("tools", "two tools have one name; give each its own")
    several = wanted.several is not False
    if form.tagged and choice == "auto" and not several:
        raise wrong("parallel_tool_calls", "a model that may call is free to call again; leave it out, or send "
                    'tool_choice: "required" or the name of a function')  # fmt: skip
    if isinstance(choice, FunctionName):
        name = choice.name
        if name not in functions:
            raise wrong("tool_choice", f"tool_choice names {name[:64]!r}, which is not among the tools")
        functions, several = {name: functions[name]}, False
    return ToolChoice(form, wanted.functions, None if choice == "auto" else form.grammar(functions, several))
