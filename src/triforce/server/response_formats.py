"""Formats that an answer may be held to: `response_format` of completions and chats, `text.format` of responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from triforce.interface.grammar import Grammar
from triforce.server.request_base import Body


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    called: ClassVar[Mapping[str, str]] = {"schema": "type json_schema takes it, as json_schema.schema"}
    type: Literal["json_object"]


_NAMED = '{"type": "json_schema", "name": ..., "schema": {...}}'
_NESTED = '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
_WORDS = (
    *("$defs", "$ref", "$schema", "additionalProperties", "allOf", "anyOf", "const", "definitions", "enum", "items"),
    *("oneOf", "properties", "required", "title", "type"),
)
"""Words of JSON schemas, which stand beside the schema where it was not put into its place."""


class JsonSchemaSpec(Body):
    """A JSON schema. It is always kept to, whatever `strict` says.

    `additional_properties: true` is an extension: an object schema that lists properties and is silent about others
    takes any others, as the standard has it. Otherwise it takes those listed only.
    """

    called: ClassVar[Mapping[str, str]] = dict.fromkeys(_WORDS, f"a JSON schema stands in schema here: {_NESTED}")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    additional_properties: bool | None = None


class SchemaFormat(Body):
    """JSON that a schema describes, as chats have it."""

    called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("description", "name", "schema", "strict", *_WORDS), f"it stands in json_schema here: {_NESTED}"
    )
    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


class FlatSchemaFormat(JsonSchemaSpec):
    """The same as responses have it."""

    called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_WORDS, f"a JSON schema stands in schema here: {_NAMED}"),
        "json_schema": f"its fields stand beside type here: {_NAMED}",
    }
    type: Literal["json_schema"]


class GrammarFormat(Body):
    """A text that a grammar in llguidance's dialect of Lark derives."""

    type: Literal["grammar"]
    lark: str = Field(alias="grammar")


class RegexFormat(Body):
    """A text that a regular expression matches as a whole: an extension of triforce's."""

    type: Literal["regex"]
    regex: str


_BY_TYPE = Field(discriminator="type")
ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat | GrammarFormat | RegexFormat, _BY_TYPE]
FlatResponseFormat = Annotated[TextFormat | JsonFormat | FlatSchemaFormat | GrammarFormat | RegexFormat, _BY_TYPE]


def grammar_of(form: ResponseFormat | FlatResponseFormat | None) -> Grammar | None:
    """Return the grammar of a format, or None for no constraint. Raises RequestError."""
    match form:
        case JsonFormat():
            return Grammar.json()
        case SchemaFormat():
            return _schema_grammar(form.json_schema)
        case FlatSchemaFormat():
            return _schema_grammar(form)
        case GrammarFormat():
            return Grammar.lark(form.lark)
        case RegexFormat():
            return Grammar.regex(form.regex)
    return None


def _schema_grammar(spec: JsonSchemaSpec) -> Grammar:
    return Grammar.json(spec.json_schema, additional_properties=bool(spec.additional_properties))
