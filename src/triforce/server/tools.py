"""Functions that a model may call, as chats have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triforce.server.fields import Body

MOST_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    """`parameters` is a JSON schema; it is always kept to, whatever `strict` says."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class OneTool(Body):
    """The one to call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: Name
    arguments: str = Field(description="A JSON object")


class ToolCall(Body):
    """A call that was made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
