"""Tools: request fields of callable functions, their grammar, and the parsing of calls in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

from triforce.interface.grammar import MAX_CHARACTERS, Grammar, closed_objects
from triforce.interface.messages import CALL_CLOSE, CALL_OPEN
from triforce.server.call_parsing import CallParser, ToolCallParser
from triforce.server.errors import ApiError, field_error, naming_field
from triforce.server.request_base import Body, unknown_field
from triforce.structured_output.compiler import GrammarError, rule_body, schema_grammar

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the parameters of a function without parameters."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of calls: a JSON object with the name of a function, and its arguments under the key `arguments_key`.

    tagged: whether a call stands between tags, so that an answer may have several.
    """

    arguments_key: str
    tagged: bool

    def grammar(self, functions: Mapping[str, Function], several: bool, answer: Grammar | None = None) -> Grammar:
        """Return a grammar of texts that are calls. functions: by their place in the body. Raises ApiError.

        answer: grammar of other texts that are allowed, too.
        """
        if answer and not self.tagged:
            return self._json_grammar(functions, answer)
        opening = f"{CALL_OPEN}\n{{" if self.tagged else "{"
        closing = f"}}\n{CALL_CLOSE}" if self.tagged else "}"
        calls = 'call ("\\n" call)*' if several and self.tagged else "call"
        rules = [f"start: {calls} | answer" if answer else f"start: {calls}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, (place, function) in enumerate(functions.items()):
            prefix = f'{opening}"name": "{function.name}", "{self.arguments_key}": '
            rules.append(f"call_{i}: {json.dumps(prefix)} arguments_{i} {json.dumps(closing)}")
            try:
                arguments = closed_objects(function.parameters or NO_PARAMETERS) | {"type": "object"}
                rules.append(f"arguments_{i}: {schema_grammar(arguments)}")
            except RecursionError as error:
                raise unusable_parameters(place, function, "they are nested too deeply") from error
            except ValueError as error:
                raise unusable_parameters(place, function, str(error)) from error
        if answer:
            rules.append(f"answer: {rule_body(answer)}")
        source = "\n".join(rules)
        if len(source) > MAX_CHARACTERS:
            raise field_error(
                "tools",
                f"the tools together are too long ({len(source)} characters of a grammar; the "
                f"maximum is {MAX_CHARACTERS}); send fewer, or simplify their parameters",
            )
        return Grammar.lark(source)

    def _json_grammar(self, functions: Mapping[str, Function], answer: Grammar) -> Grammar:
        """Return one JSON schema of a call or an answer: two rules that begin alike would exclude each other."""
        rule_body(answer)  # raises for Lark
        if answer.kind != "json_schema":
            raise field_error("tools", "with this model tools go with a JSON schema only; leave out the other format")
        schemas: list[Any] = []
        for function in functions.values():
            arguments = closed_objects(function.parameters or NO_PARAMETERS) | {"type": "object"}
            schemas.append({
                "type": "object",
                "properties": {"name": {"const": function.name}, self.arguments_key: arguments},
                "required": ["name", self.arguments_key],
                "additionalProperties": False,
            })  # fmt: skip
        return Grammar("json_schema", json.dumps({"anyOf": [*schemas, json.loads(answer.source)]}))

    @staticmethod
    def function_at(line: int) -> int:
        """Return the index of the function of a line of the grammar. A function has two lines, after the first two."""
        return (line - 3) // 2


def unusable_parameters(place: str, function: Function, reason: str) -> ApiError:
    """Return the error of parameters, at a place in the body, that cannot be compiled to a grammar."""
    text = f"the parameters of {function.name} cannot be enforced: {reason}; change or simplify them"
    return field_error(place, text)


QWEN = CallFormat("arguments", tagged=True)
LLAMA = CallFormat("parameters", tagged=False)


def call_format(template: str) -> CallFormat | None:
    """Return the call format of a chat template, or None if it is unknown.

    A template without tools gets the form in which `messages.told_in_text` tells them.
    """
    if "tool" not in template:
        return QWEN
    if CALL_OPEN in template and '"arguments"' in template:
        return QWEN
    return LLAMA if '"parameters": ' in template and "ipython" in template else None


MAX_TOOLS = 128
MAX_LEVELS = 128
"""Maximal nesting of a schema, safe for grammars and for JSON serialization."""
MAX_PARTS_OF_SCHEMA = 10_000
"""Maximal number of values of a schema."""
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FUNCTION_ADVICE = 'send it in function: {"type": "function", "function": {"name": ..., "parameters": {...}}}'
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


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
    parameters: Annotated[dict[str, Any], AfterValidator(check_size), AfterValidator(_check_object)] | None = None
    strict: bool | None = None


class Tool(Body):
    tolerant: ClassVar[bool] = True
    field_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("description", "name", "parameters", "strict"), _FUNCTION_ADVICE
    )
    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """A tool in the form of responses."""

    type: Literal["function"]


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


class OneFlatTool(FunctionName):
    """Choice of the function to call, in the form of responses."""

    type: Literal["function"]


class ToolFields(Body):
    """Tools of a request. Tools that are no functions, such as web search, are skipped and named as ignored."""

    @model_validator(mode="wrap")
    @classmethod
    def _skip_other_tools(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tools = data.get("tools") if isinstance(data, dict) else None
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
            return handler(data)
        if chosen_kind := _unsupported_kind(data.get("tool_choice")):
            raise unknown_field("tool_choice", f"{chosen_kind} is no function, and only functions are supported")
        skipped_kinds = {kind for tool in tools if (kind := _unsupported_kind(tool))}
        # None in place of skipped tools keeps the indices, which errors name
        functions = [None if _unsupported_kind(tool) else tool for tool in tools]
        if skipped_kinds and not any(functions):
            advice = "none of them is a function, and only functions are supported; leave them out"
            raise unknown_field("tools", advice)
        body = handler(data | {"tools": functions} if skipped_kinds else data)
        body.ignore(*(f"tools.{kind}" for kind in skipped_kinds))
        return body


def _unsupported_kind(tool: Any) -> str | None:
    """Return the type of a tool that is no function; None for a function, and for a type that no header can hold."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind != "function" and _KIND.fullmatch(kind) else None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools of a request. Without `forced` the model decides whether to call one."""

    form: CallFormat
    tools: Mapping[str, Function]
    """Callable functions by the place of their parameters in the body."""
    forced: Mapping[str, Function] | None = None
    """Functions of a required call, by place: the answer consists of calls of these functions only."""
    several: bool = True
    output_format: str | None = None
    """Name of the field that constrains an answer without calls, if there is one."""

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of the answer, or None for any text. Raises ApiError.

        A forced answer is a call. Another one is a call, or a text of the grammar `answer`.
        """
        if self.forced is not None:
            return self.form.grammar(self.forced, self.several)
        if answer is None:
            return None
        with naming_field(self.output_format or "tools"):
            return self.form.grammar(self.tools, self.several, answer)

    def refusal(self, error: GrammarError) -> ApiError:
        """Return the error of a request whose `grammar` does not compile. It names the faulty parameters."""
        functions = list((self.tools if self.forced is None else self.forced).items())
        if error.line is None or not 0 <= (index := self.form.function_at(error.line)) < len(functions):
            field = self.output_format if error.line is not None and self.output_format else "tools"
            what = "this format" if field != "tools" else "the parameters of these tools"
            return field_error(field, f"{what} cannot be enforced: {error.reason}; simplify it")
        return unusable_parameters(*functions[index], error.reason)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer of at most one call."""
        return (CALL_CLOSE,) if self.forced is None and self.form.tagged and not self.several else ()

    def parser(self) -> ToolCallParser:
        """Return a parser for one answer."""
        names = {tool.name for tool in self.tools.values()}
        is_forced = self.forced is not None
        bare = not self.form.tagged or (not is_forced and self.output_format is None)
        return CallParser(names, marked=self.form.tagged, bare=bare, several=self.several, forced=is_forced)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates."""
        template_fields = {"name", "description", "parameters"}
        dumped = [tool.model_dump(include=template_fields, exclude_none=True) for tool in self.tools.values()]
        return [{"type": "function", "function": function} for function in dumped]


def parser_of(tools: ToolChoice | None) -> ToolCallParser:
    """Return a parser for one answer; without tools all of it is text."""
    return tools.parser() if tools else ToolCallParser()


def choose_tools(
    template: str,
    functions: Mapping[str, Function],
    choice: str | FunctionName | None,
    *,
    several: bool,
    calls_field: str | None,
    output_format: str | None,
) -> ToolChoice | None:
    """Return the tools that the model may call, or None. Raises ApiError.

    functions: by the place of their parameters in the body. several: whether an answer may have several calls.
    calls_field: the field of the turns, if turns contain calls or results of calls. output_format: the field that
    constrains an answer without calls, if there is one.
    """
    form = call_format(template)
    choice = choice or "auto"
    if form is None and (field := "tools" if functions else calls_field):
        raise field_error(
            field,
            "this model's chat template has no known format of tool calls, such as that of Llama 3 or Qwen; leave "
            "out tools and calls",
        )
    if choice not in ("none", "auto") and not functions:
        raise field_error("tool_choice", "tool_choice needs tools to choose from")
    if form is None or not functions or choice == "none":
        return None
    if len({function.name for function in functions.values()}) < len(functions):
        raise field_error("tools", "two tools have the same name; give each its own")
    if isinstance(choice, FunctionName):
        forced = {place: function for place, function in functions.items() if function.name == choice.name}
        if not forced:
            raise field_error("tool_choice", f"tool_choice names {choice.name[:64]!r}, which is not among the tools")
        return ToolChoice(form, functions, forced, several=False)
    if choice == "auto":
        return ToolChoice(form, functions, None, several, output_format)
    return ToolChoice(form, functions, functions, several)
