"""Tools of /v1/responses: functions, tools with free text, and namespaces of both, as functions that a model calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from triforce.server.answers.answer_parts import Call
from triforce.server.request_base import Body
from triforce.server.tools import MAX_TOOLS, Function, FunctionName, Name, ToolFields

FREE_TEXT = "input"
"""Name of the only parameter of the function that stands for a tool with free text."""
SEPARATOR = "__"
"""Between a namespace and the name of a function in it, where the namespace does not end so."""


def full_name(namespace: str | None, name: str) -> str:
    """Return the name under which a model sees a tool of a namespace."""
    return f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}" if namespace else name


class FlatTool(Function):
    """A function in the form of responses."""

    type: Literal["function"]

    def function(self, namespace: str | None) -> Function:
        """Return the function under the name that the model sees."""
        return self.model_copy(update={"name": full_name(namespace, self.name)})


class TextGrammar(Body):
    """The form of a free text. It is told to the model, and not enforced: the text is a string within JSON."""

    tolerant: ClassVar[bool] = True
    type: str
    definition: str | None = None


class CustomTool(Body):
    """A tool whose argument is a free text, not JSON."""

    tolerant: ClassVar[bool] = True
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: TextGrammar | None = None

    def function(self, namespace: str | None) -> Function:
        """Return a function of one string."""
        grammar = self.format.definition if self.format else None
        told_grammar = f"The {FREE_TEXT} has this grammar:\n{grammar}" if grammar else None
        text = "\n\n".join(filter(None, [self.description, told_grammar]))
        properties = {FREE_TEXT: {"type": "string", "description": "The whole text, without JSON in it"}}
        schema = {"type": "object", "properties": properties, "required": [FREE_TEXT], "additionalProperties": False}
        return Function.model_construct(
            name=full_name(namespace, self.name), description=text or None, parameters=schema
        )


def _tag(tool: Any) -> str:
    """Return the tag of a tool. It is no field of a tool, so that the place of an error is read without it."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return f"{kind} tool" if kind in ("custom", "namespace") else "function tool"


PlainTool = Annotated[
    Annotated[FlatTool, Tag("function tool")] | Annotated[CustomTool, Tag("custom tool")], Discriminator(_tag)
]


class NamespaceTool(ToolFields):
    """Tools of one origin, such as a server of MCP."""

    tolerant: ClassVar[bool] = True
    function_kinds: ClassVar[Collection[str]] = ("function", "custom")
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[PlainTool | None], Field(max_length=MAX_TOOLS, fail_fast=True)]


ResponseTool = Annotated[
    Annotated[FlatTool, Tag("function tool")]
    | Annotated[CustomTool, Tag("custom tool")]
    | Annotated[NamespaceTool, Tag("namespace tool")],
    Discriminator(_tag),
]


class OneFlatTool(FunctionName):
    """Choice of the tool to call, in the form of responses."""

    type: Literal["function", "custom"]
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a request. function: as the model sees it."""

    name: str
    namespace: str | None
    is_custom: bool
    function: Function
    place: str
    """Place of its parameters in the body."""


def offered_tools(tools: Iterable[ResponseTool | None]) -> Iterator[OfferedTool]:
    """Yield the tools of a request, those of namespaces singly."""
    for i, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            parts = ((j, part) for j, part in enumerate(tool.tools) if part)
            yield from (_offered(part, tool.name, f"tools.{i}.tools.{j}.parameters") for j, part in parts)
        elif tool:
            yield _offered(tool, None, f"tools.{i}.parameters")


def _offered(tool: FlatTool | CustomTool, namespace: str | None, place: str) -> OfferedTool:
    return OfferedTool(tool.name, namespace, isinstance(tool, CustomTool), tool.function(namespace), place)


def call_item(call: Call, tools: Mapping[str, OfferedTool]) -> dict[str, Any]:
    """Return the fields of a call's item, under the names of the request. tools: by the name that the model sees."""
    tool = tools.get(call.name)
    fields: dict[str, Any] = {"name": tool.name if tool else call.name}
    if tool and tool.namespace:
        fields["namespace"] = tool.namespace
    if tool and tool.is_custom:
        return {"type": "custom_tool_call"} | fields | {"input": free_text(call.arguments)}
    return {"type": "function_call"} | fields | {"arguments": call.arguments}


def free_text(arguments: str) -> str:
    """Return the text of a call with free text. A model may name its parameter otherwise, or write bare JSON."""
    values: Mapping[str, Any] = json.loads(arguments)
    text = values.get(FREE_TEXT, next(iter(values.values())) if len(values) == 1 else None)
    return text if isinstance(text, str) else arguments
