"""Grammar: what a text must look like. `structured_output.compiler` compiles it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any, Literal, Self, get_origin

from triforce.errors import RequestError, require_bool
from triforce.interface.closed_objects import closed_objects
from triforce.interface.frozen_fields import fields_frozen

MOST_CHARACTERS = 65_536
_KINDS = ("json_schema", "regex", "lark")


@fields_frozen
@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole of a text matches, from the first new token to the end-of-sequence token.

    source: a JSON schema as JSON text, a regular expression without look-around, or a grammar in llguidance's
    dialect of Lark. Raises RequestError for one that is empty or longer than `MOST_CHARACTERS`.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise RequestError(f"a grammar is one of {', '.join(_KINDS)}, not {self.kind!r}")
        if not isinstance(self.source, str) or not self.source:
            raise RequestError(f"a grammar ({self.kind}) must be a text of at least one character")
        if len(self.source) > MOST_CHARACTERS:
            raise RequestError(
                f"a grammar ({self.kind}) of {len(self.source)} characters is too long; {MOST_CHARACTERS} are the most"
            )

    @property
    def holds_json(self) -> bool:
        """Whether a part of the text is described by a JSON schema."""
        return self.kind == "json_schema" or (self.kind == "lark" and "%json" in self.source)

    @classmethod
    def json(cls, schema: Any = None, *, additional_properties: bool = False) -> Self:
        """Return the grammar of a JSON schema: an object, JSON text, or a pydantic model; None is any JSON object.

        additional_properties: whether an object schema that lists properties and is silent about others takes any
        others, as the standard has it. Else it takes those listed only, as if it had `additionalProperties: false`;
        objects of compositions (`anyOf`, `allOf`, ...) stay open, and so do objects without listed properties.

        Properties come in the order in which the schema lists them. A number of 40 characters ends as soon as it may,
        and white space is indentation at most, as some models would go on for ever. Raises RequestError.
        """
        require_bool("additional_properties", additional_properties)
        try:
            text = schema if isinstance(schema, str) else json.dumps(_schema(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema cannot be written as JSON ({error}); simplify it") from error
        grammar = cls("json_schema", text)
        return grammar if additional_properties else cls("json_schema", _closed(text))

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Self:
        """Return the grammar of a text that is one of these. Raises RequestError where they are not texts."""
        given = [] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
        if not given or not all(isinstance(text, str) and text for text in given):
            shown = texts if isinstance(texts, Sized) or not isinstance(texts, Iterable) else given
            raise RequestError(f'choices are a list of texts, such as ["yes", "no"], not {shown!r}')
        listed = " | ".join(json.dumps(text, ensure_ascii=False) for text in given)
        return cls("lark", f"start: TEXT\nTEXT: {listed}")  # one terminal: rules may have 2,000 alternatives

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of a regular expression that matches whole texts. Raises RequestError."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return a context-free grammar of texts that its rule `start` derives. Raises RequestError."""
        return cls("lark", grammar)


def _closed(text: str) -> str:
    """Return a JSON schema with its objects closed; one that is no JSON object, or is nested too deeply, as it is."""
    try:
        schema = json.loads(text)
        closed = closed_objects(schema) if isinstance(schema, dict) else schema
        return text if closed == schema else json.dumps(closed)
    except (ValueError, RecursionError):
        return text


def _schema(given: Any) -> Any:
    """Return a schema as `json.dumps` takes it. Models and type adapters of pydantic make their own."""
    if given is None:
        return {"type": "object"}
    if get_origin(given) and "pydantic" in sys.modules:  # list[Model], say
        from pydantic import TypeAdapter

        given = TypeAdapter(given)
    make = getattr(given, "model_json_schema", None) or getattr(given, "json_schema", None)
    return make() if callable(make) else given
