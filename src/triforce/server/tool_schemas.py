"""Functions that a model may call, as chats and responses have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from triforce.server.request_base import Body

MOST_TOOLS = 128
MOST_LEVELS = 128
"""Nesting of schemas: grammars take it, and it can be written back as JSON without fear."""
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _shallow(schema: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [schema]
    for _ in range(MOST_LEVELS):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return schema
    raise PydanticCustomError("too_deep", "this schema is nested too deeply; simplify it")


def _parts(whole: Any) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ()


class Function(Body):
    """`parameters` is a JSON schema; it is always kept to, whatever `strict` says."""

    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_shallow)] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FlatTool(Function):
    """The same as responses have it."""

    type: Literal["function"]


class FunctionName(Body):
    name: str


class OneTool(Body):
    """The one to call."""

    type: Literal["function"]
    function: FunctionName


class OneFlatTool(FunctionName):
    """The same as responses have it."""

    type: Literal["function"]


class CalledFunction(Body):
    name: Name
    arguments: str = Field(description="A JSON object")


class ToolCall(Body):
    """A call that was made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Fields about tools, from whichever endpoint."""

    functions: Sequence[Function]
    choice: str | FunctionName | None
    """none, auto, which is the default, required, or the one to call."""
    several: bool | None
    """Whether an answer may have several calls."""
    spoken: bool
    """Whether calls, or what they gave, are among the turns."""
    output_format: str | None
    """The field that holds the answer to a format."""
