"""Tools: request fields of callable functions, and what an answer may call."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

from triforce.interface.grammar import Grammar
from triforce.server.answers.answer_parts import MAX_LEVELS
from triforce.server.answers.call_format import CallableFunction, CallFormat, function_at, unusable_parameters
from triforce.server.answers.marks import Marks
from triforce.server.errors import ApiError, field_error, naming_field
from triforce.server.request_base import Body, unknown_field
from triforce.structured_output.compiler import GrammarError

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the parameters of a function without parameters."""


MAX_TOOLS = 512
MAX_PARTS_OF_SCHEMA = 10_000
"""Maximal number of values of a schema."""
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_QUOTED_WORD = re.compile(r'"([A-Za-z$]+)"')
_FUNCTION_ADVICE = 'send it in function: {"type": "function", "function": {"name": ..., "parameters": {...}}}'
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


def check_size(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object if its nesting and its number of values are within the limits."""
    level = list[Any]([schema])
    count = 0
    for _ in range(MAX_LEVELS):
        count += sum(len(container) for container in level)
        if count > MAX_PARTS_OF_SCHEMA:
            raise PydanticCustomError("too_large", "this object has too many parts; simplify it")
        level = [part for container in level for part in _parts(container) if isinstance(part, dict | list)]
        if not level:
            return schema
    raise PydanticCustomError("too_deep", "this object is nested too deeply; simplify it")


def _check_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema if it may describe an object, without checking compositions and references."""
    kinds = schema.get("type", "object")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    object_listed = not isinstance(values, list) or any(isinstance(value, dict) for value in values)
    if object_listed and (kinds == "object" or (isinstance(kinds, list) and "object" in kinds)):
        return schema
    shape = '{"type": "object", "properties": {...}}'
    raise PydanticCustomError(
        "no_object", "the parameters of a function must describe an object: {shape}", {"shape": shape}
    )


Parameters = Annotated[dict[str, Any], AfterValidator(check_size), AfterValidator(_check_object)]
"""Schema of a function's parameters."""


def _parts(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


class Function(Body):
    """A function. `parameters` is a JSON schema of an object. It is always enforced, with any value of `strict`."""

    tolerant: ClassVar[bool] = True
    field_advice: ClassVar[Mapping[str, str]] = {
        "function": 'send its fields beside type: {"type": "function", "name": ..., "parameters": {...}}'
    }
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Body):
    tolerant: ClassVar[bool] = True
    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("description", "name", "parameters", "strict"), _FUNCTION_ADVICE
    )
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    field_advice: ClassVar[Mapping[str, str]] = {
        "function": 'send its name beside type: {"type": "function", "name": ...}'
    }
    name: str


class OneTool(Body):
    """Choice of the function to call."""

    field_advice: ClassVar[Mapping[str, str]] = {
        "name": 'send it in function: {"type": "function", "function": {"name": ...}}'
    }
    type: Literal["function"]
    function: FunctionName


class ToolFields(Body):
    """Tools of a request. Tools that are no functions, such as web search, are skipped and named as ignored."""

    function_kinds: ClassVar[Collection[str]] = ("function",)
    """Types of tools that are served. A tool without a type is a function, where the door has such."""
    choice_kinds: ClassVar[Collection[str]] = ("function",)
    """Types of `tool_choice` that are served."""

    @model_validator(mode="wrap")
    @classmethod
    def _skip_other_tools(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tools = data.get("tools") if isinstance(data, dict) else None
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
            return handler(data)
        if chosen_kind := _unsupported_kind(data.get("tool_choice"), cls.choice_kinds):
            raise unknown_field("tool_choice", f"{chosen_kind} is no function, and only functions are supported")
        skipped_kinds = {kind for tool in tools if (kind := _unsupported_kind(tool, cls.function_kinds))}
        # None in place of skipped tools keeps the indices, which errors name
        functions = [None if _unsupported_kind(tool, cls.function_kinds) else tool for tool in tools]
        if skipped_kinds and not any(functions) and not cls.tolerant:
            advice = "none of them is a function, and only functions are supported; leave them out"
            raise unknown_field("tools", advice)
        body = handler(data | {"tools": functions} if skipped_kinds else data)
        body.ignore(*(f"tools.{kind}" for kind in skipped_kinds))
        return body


def _unsupported_kind(tool: Any, kinds: Collection[str]) -> str | None:
    """Return the type of a tool that is none of `kinds`; None for others, and for a type that no header can hold."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind not in kinds and _KIND.fullmatch(kind) else None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools of a request. Without `forced` the model decides whether to call one."""

    form: CallFormat
    marks: Marks
    functions: Sequence[CallableFunction]
    """Callable functions."""
    forced: Sequence[CallableFunction] | None = None
    """Functions of a required call: the answer consists of calls of these functions only."""
    several: bool = True
    output_format: str | None = None
    """Name of the field that constrains an answer without calls, if there is one."""

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the answer, or None for any text. Raises ApiError.

        A forced answer is a call. Another one is a call, or a text of the grammar `answer`.
        """
        if self.forced is not None:
            return self.form.grammar(self.marks, self.forced, self.several)
        if answer is None:
            return None
        with naming_field(self.output_format or "tools"):
            return self.form.grammar(self.marks, self.functions, self.several, answer)

    def refusal(self, error: GrammarError, grammar: Grammar) -> ApiError:
        """Return the error of a request whose `grammar` does not compile. It names the faulty parameters."""
        functions = self.functions if self.forced is None else self.forced
        index = None if error.line is None else function_at(grammar.source, error.line)
        if index is None:
            field = self.output_format if error.line is not None and self.output_format else "tools"
            what = "this format" if field != "tools" else "the parameters of these tools"
            return field_error(field, f"{what} cannot be enforced: {error.reason}; simplify it")
        keyword = _QUOTED_WORD.search(error.reason)
        path = property_with(functions[index].parameters, keyword[1]) if keyword else None
        return unusable_parameters(functions[index], f"{path}: {error.reason}" if path else error.reason)

    @property
    def closing(self) -> str:
        """Mark that ends an answer of at most one call; empty without one."""
        return self.form.closing if self.forced is None and not self.several else ""


def property_with(schema: Any, keyword: str) -> str | None:
    """Return the path of the first property whose schema has a keyword: names with dots between; None without one."""
    pending: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while pending:
        part, path = pending.pop(0)
        if isinstance(part, list):
            pending += [(entry, path) for entry in part]
        elif isinstance(part, dict):
            if keyword in part and path:
                return ".".join(path)
            properties = part.get("properties")
            pending += [(value, path) for name, value in part.items() if name != "properties"]
            if isinstance(properties, dict):
                pending += [(value, (*path, name)) for name, value in properties.items()]
    return None


def shown_tools(tools: Iterable[Function]) -> list[dict[str, Any]]:
    """Return tools in the form of chat templates."""
    template_fields = {"name", "description", "parameters"}
    dumped = [tool.model_dump(include=template_fields, exclude_none=True) for tool in tools]
    return [{"type": "function", "function": function} for function in dumped]


def choose_tools(
    form: CallFormat | None,
    marks: Marks,
    tools: Mapping[str, Function],
    choice: str | FunctionName | None,
    *,
    several: bool,
    calls_field: str | None,
    output_format: str | None,
) -> ToolChoice | None:
    """Return the tools that the model may call, or None. Raises ApiError.

    form: of the chat template's calls; None if it is unknown. tools: by the place of their parameters in the body.
    several: whether an answer may have several calls. calls_field: the field of the turns, if turns contain calls or
    results of calls. output_format: the field that constrains an answer without calls, if there is one.
    """
    choice = choice or "auto"
    if form is None and (field := "tools" if tools else calls_field):
        raise field_error(
            field,
            "this model's chat template has no known format of tool calls, such as that of Llama 3 or Qwen; leave "
            "out tools and calls",
        )
    if choice not in ("none", "auto") and not tools:
        raise field_error("tool_choice", "tool_choice needs tools to choose from")
    if form is None or not tools or choice == "none":
        return None
    functions = [
        CallableFunction(tool.name, place, NO_PARAMETERS if tool.parameters is None else tool.parameters)
        for place, tool in tools.items()
    ]
    if len({function.name for function in functions}) < len(functions):
        raise field_error("tools", "two tools have the same name; give each its own")
    if isinstance(choice, FunctionName):
        forced = [function for function in functions if function.name == choice.name]
        if not forced:
            raise field_error("tool_choice", f"tool_choice names {choice.name[:64]!r}, which is not among the tools")
        return ToolChoice(form, marks, functions, forced, several=False)
    if choice == "auto":
        return ToolChoice(form, marks, functions, None, several, output_format)
    return ToolChoice(form, marks, functions, functions, several)
