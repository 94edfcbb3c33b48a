"""What a chat says of tools: which are shown to the model, and what its answer is held to and read by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triforce.grammar import Grammar
from triforce.server.calls import CallFormat, CallReader, call_format
from triforce.server.failures import wrong
from triforce.server.schemas import ChatBody
from triforce.server.tools import OneTool, Tool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one chat. With `forced` an answer is calls and nothing else; without, the model is free to call."""

    form: CallFormat
    tools: list[Tool]
    forced: Grammar | None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        told = ("name", "description", "parameters")
        functions = [{key: getattr(tool.function, key) for key in told} for tool in self.tools]
        return [
            {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
            for function in functions
        ]

    def reader(self) -> CallReader:
        """For one answer."""
        return self.form.reader({tool.function.name for tool in self.tools})


def toolbox(body: ChatBody, template: str) -> Toolbox | None:
    """The tools that may be called; None if there are none. Raises Refusal or RequestError."""
    form, choice = call_format(template), body.tool_choice or "auto"
    spoken = any(message.tool_calls or message.role == "tool" for message in body.messages)
    if form is None and (body.tools or spoken):
        raise wrong("tools", "this model's chat template has no calls of tools that can be read here (as Llama 3 or "
                    "Qwen write them); leave them out")  # fmt: skip
    if choice not in ("none", "auto") and not body.tools:
        raise wrong("tool_choice", "tool_choice needs tools to choose from")
    if form is None or not body.tools or choice == "none":
        return None
    if body.response_format and body.response_format.type != "text":
        raise wrong("response_format", "an answer is held to response_format or may call tools; send one of them, or "
                    'tool_choice: "none"')  # fmt: skip
    functions = {tool.function.name: tool.function.parameters for tool in body.tools}
    if len(functions) < len(body.tools):
        raise wrong("tools", "two tools have one name; give each its own")
    several = body.parallel_tool_calls is not False
    if form.tagged and choice == "auto" and not several:
        raise wrong("parallel_tool_calls", "a model that may call is free to call again; leave it out, or send "
                    'tool_choice: "required" or the name of a function')  # fmt: skip
    if isinstance(choice, OneTool):
        name = choice.function.name
        if name not in functions:
            raise wrong("tool_choice", f"tool_choice names {name[:64]!r}, which is not among the tools")
        functions, several = {name: functions[name]}, False
    return Toolbox(form, body.tools, None if choice == "auto" else form.grammar(functions, several))
