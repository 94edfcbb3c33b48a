"""Tools of one request: those shown to the model, the grammar of its answer, and the answer's parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triforce.interface.grammar import Grammar
from triforce.server.errors import wrong
from triforce.server.tool_call_parser import CallFormat, NoCalls, ToolCallParser, call_format
from triforce.server.tool_schemas import Function, FunctionName, ToolRequest


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools of a request. With `forced` the answer is calls and nothing else; without, the model is free to call."""

    form: CallFormat
    tools: Sequence[Function]
    forced: Grammar | None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        shown_keys = ("name", "description", "parameters")
        functions = [{key: getattr(tool, key) for key in shown_keys} for tool in self.tools]
        return [
            {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
            for function in functions
        ]

    def parser(self) -> ToolCallParser:
        """Return a parser for one answer."""
        return self.form.parser({tool.name for tool in self.tools})


def parser_of(tools: ToolChoice | None) -> ToolCallParser:
    """Return a parser for one answer, whether it may call or not."""
    return tools.parser() if tools else NoCalls()


def choose_tools(request: ToolRequest, template: str) -> ToolChoice | None:
    """Return the tools that may be called; None if there are none. Raises ApiError or RequestError."""
    form, choice = call_format(template), request.choice or "auto"
    if form is None and (request.functions or request.spoken):
        raise wrong("tools", "this model's chat template has no calls of tools that can be read here (as Llama 3 or "
                    "Qwen write them); leave them out")  # fmt: skip
    if choice not in ("none", "auto") and not request.functions:
        raise wrong("tool_choice", "tool_choice needs tools to choose from")
    if form is None or not request.functions or choice == "none":
        return None
    if request.output_format:
        raise wrong(request.output_format, f"an answer is held to {request.output_format} or may call tools; send one "
                    'of them, or tool_choice: "none"')  # fmt: skip
    functions = {function.name: function.parameters for function in request.functions}
    if len(functions) < len(request.functions):
        raise wrong("tools", "two tools have one name; give each its own")
    several = request.several is not False
    if form.tagged and choice == "auto" and not several:
        raise wrong("parallel_tool_calls", "a model that may call is free to call again; leave it out, or send "
                    'tool_choice: "required" or the name of a function')  # fmt: skip
    if isinstance(choice, FunctionName):
        name = choice.name
        if name not in functions:
            raise wrong("tool_choice", f"tool_choice names {name[:64]!r}, which is not among the tools")
        functions, several = {name: functions[name]}, False
    return ToolChoice(form, request.functions, None if choice == "auto" else form.grammar(functions, several))
