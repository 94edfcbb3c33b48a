"""The format of an answer: `response_format`, and `text.format` of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triforce.interface.grammar import Grammar
from triforce.server.request_base import Body


class Format(Body):
    """A constraint on the answer."""

    def grammar(self) -> Grammar | None:
        """Return the grammar, or None for no constraint. Raises RequestError."""
        return None


class TextFormat(Format):
    """Anything."""

    type: Literal["text"]


class JsonFormat(Format):
    """Any JSON object."""

    type: Literal["json_object"]

    def grammar(self) -> Grammar | None:
        return Grammar.json()


class JsonSchemaSpec(Format):
    """A JSON schema. It is always kept to, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")

    def grammar(self) -> Grammar | None:
        return Grammar.json(self.json_schema)


class SchemaFormat(Format):
    """JSON that a schema describes, as chats have it."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec

    def grammar(self) -> Grammar | None:
        return self.json_schema.grammar()


class FlatSchemaFormat(JsonSchemaSpec):
    """The same as responses have it."""

    type: Literal["json_schema"]


class GrammarFormat(Format):
    """A text that a grammar in llguidance's dialect of Lark derives."""

    type: Literal["grammar"]
    lark: str = Field(alias="grammar")

    def grammar(self) -> Grammar | None:
        return Grammar.lark(self.lark)


class RegexFormat(Format):
    """A text that a regular expression matches as a whole: an extension of triforce's."""

    type: Literal["regex"]
    regex: str

    def grammar(self) -> Grammar | None:
        return Grammar.regex(self.regex)


ResponseFormat = Annotated[
    TextFormat | JsonFormat | SchemaFormat | GrammarFormat | RegexFormat, Field(discriminator="type")
]


class TextOptions(Body):
    """`text` of responses."""

    format: (
        Annotated[TextFormat | JsonFormat | FlatSchemaFormat | GrammarFormat | RegexFormat, Field(discriminator="type")]
        | None
    ) = None
