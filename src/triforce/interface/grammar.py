"""Grammar: a constraint on the output text. `structured_output.compiler` compiles it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sized
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, Self, get_origin
from urllib.parse import unquote

from triforce.errors import RequestError, require_bool
from triforce.interface.frozen_fields import fields_frozen

JSONSchema = dict[str, Any]

ANNOTATIONS = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
    "examples", "readOnly", "title", "writeOnly", "x-guidance",
}  # fmt: skip
"""Keywords that do not constrain a value."""
COMPOSITIONS = {"allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
"""Keywords whose subschemas apply to the same value as the enclosing schema."""
OTHER_PROPERTIES = {
    "additionalProperties", "const", "dependentRequired", "enum", "patternProperties", "propertyNames",
    "unevaluatedProperties",
}  # fmt: skip
"""Keywords that constrain properties beside the listed ones."""
NAMED_SCHEMAS = {"dependencies", "dependentSchemas", "patternProperties", "properties"}
"""Keywords whose values map names to schemas."""
NESTED_SCHEMAS = {
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
"""Keywords whose values are a schema, or a list of schemas."""
UNRESOLVED_REFERENCES = {"$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"}
"""Keywords of references that this module does not resolve."""


def closed_objects(schema: JSONSchema) -> JSONSchema:
    """Return a schema with `additionalProperties: false` in object schemas that list properties and allow no others.

    These object schemas stay open:

    - One that is part of a composition: it stands in the value of a keyword of `COMPOSITIONS`, or beside the keyword.
    - One that is referenced from a composition, or by a `$ref` that has other keywords beside it.
    - One with a keyword of `OTHER_PROPERTIES`.
    - One that requires properties that it does not list.

    A choice between `null` and one other schema is no composition. The whole schema stays unchanged if a reference is
    not a JSON pointer into it. Raises RecursionError for a schema nested too deeply.
    """
    root = deepcopy(schema)
    for part, is_composed in _value_schemas(root):
        if not is_composed and _lists_required(part):
            part["additionalProperties"] = False
    return root


def _value_schemas(root: JSONSchema) -> list[tuple[JSONSchema, bool]]:
    """Return the schemas that describe values, each with whether it is part of a composition.

    The list is empty if a reference cannot be resolved.
    """
    states: dict[int, tuple[JSONSchema, bool]] = {}
    pending: list[tuple[Any, bool]] = [(root, False)]
    while pending:
        part, is_composed = pending.pop()
        state = states.get(id(part))
        if not isinstance(part, dict) or (state and state[1] >= is_composed):
            continue
        if UNRESOLVED_REFERENCES & part.keys() or ("$id" in part and part is not root):
            return []
        states[id(part)] = part, is_composed
        try:
            pending += _subschemas(root, part, is_composed)
        except LookupError:
            return []
    return [*states.values()]


def _subschemas(root: JSONSchema, part: JSONSchema, is_composed: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the subschemas of a schema, each with whether it is part of a composition. Raises LookupError."""
    constraints = part.keys() - ANNOTATIONS
    optional = _optional_alternative(part) if len(constraints) == 1 else None
    if optional is not None:
        yield optional, is_composed
        return
    in_composition = is_composed or bool(constraints & COMPOSITIONS) or ("$ref" in part and len(constraints) > 1)
    if "$ref" in part:
        yield resolve_reference(root, part["$ref"]), in_composition
    if in_composition and not is_composed:  # `part` itself is composed
        yield part, True
    inner_composed = in_composition or "patternProperties" in part or "contains" in part
    for keyword in constraints:
        for value in _schemas(part, keyword):
            yield value, inner_composed


def _optional_alternative(part: JSONSchema) -> Any:
    """Return the only alternative beside `null`; None unless there is exactly one."""
    alternatives = part.get("anyOf", part.get("oneOf"))
    if not isinstance(alternatives, list):
        return None
    value_alternatives = [alternative for alternative in alternatives if alternative != {"type": "null"}]
    return value_alternatives[0] if len(value_alternatives) == 1 else None


def _schemas(part: JSONSchema, keyword: str) -> Iterable[Any]:
    """Return the schemas in the value of a keyword; none for a keyword that holds none."""
    value = part[keyword]
    if keyword in NAMED_SCHEMAS:
        return value.values() if isinstance(value, dict) else ()
    if keyword in NESTED_SCHEMAS:
        return value if isinstance(value, list) else (value,)
    return ()


def resolve_reference(root: JSONSchema, reference: Any) -> Any:
    """Return the part of `root` that a JSON pointer refers to. Raises LookupError."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise LookupError
    part: Any = root
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part = part[int(key)] if key.isdecimal() else None
        elif isinstance(part, dict):
            part = part[key]
        else:
            raise LookupError
    return part


def _lists_required(part: JSONSchema) -> bool:
    """Return whether the listed properties include all that the schema requires."""
    properties = part.get("properties")
    if not isinstance(properties, dict) or OTHER_PROPERTIES & part.keys():
        return False
    required = part.get("required", [])
    min_properties = part.get("minProperties", 0)
    lists_enough = isinstance(min_properties, int | float) and min_properties <= len(properties)
    return (
        lists_enough
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


WRAPPER = {"description", "name", "schema", "strict"}
"""Fields of OpenAI's `response_format.json_schema`, which wraps a schema."""
MAX_CHARACTERS = 65_536
ANY_TEXT = "/(?s:.*)/"
"""A part of a grammar in Lark that any text fits."""
_KINDS = ("json_schema", "regex", "lark")


@fields_frozen
@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole output matches, from the first new token to the end-of-sequence token.

    Raises RequestError for a source that is empty or longer than `MAX_CHARACTERS`.
    """

    kind: Literal["json_schema", "regex", "lark"]
    """Language of the source."""
    source: str
    """JSON schema as JSON text, regular expression without look-around, or grammar in llguidance's dialect of Lark."""
    token_ids: tuple[int, ...] = ()
    """Tokens that Lark names by id, as in `<[5]>`, and that are part of no text of the grammar."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise RequestError(f"a grammar is one of {', '.join(_KINDS)}, not {self.kind!r}")
        if not isinstance(self.source, str):
            raise TypeError(f"a grammar ({self.kind}) is of type {type(self.source).__name__}; pass its text")
        if not self.source:
            raise RequestError(f"a grammar ({self.kind}) must be a text of at least one character")
        if len(self.source) > MAX_CHARACTERS:
            raise RequestError(
                f"a grammar ({self.kind}) of {len(self.source)} characters is too long; the maximum is {MAX_CHARACTERS}"
            )

    @property
    def holds_json(self) -> bool:
        """Whether JSON is all of the text that may hold numbers, so that the length of these is limited."""
        return self.kind == "json_schema" or (
            self.kind == "lark" and "%json" in self.source and ANY_TEXT not in self.source
        )

    @classmethod
    def json(cls, schema: Any = None, *, additional_properties: bool = False) -> Self:
        """Return the grammar of a JSON schema: an object, JSON text, or a pydantic model; None is any JSON object.

        additional_properties: concerns object schemas that list properties and have no `additionalProperties`. With
        True they accept other properties, as in the standard. With False they accept the listed properties only.
        Objects of compositions (`anyOf`, `allOf`, ...), objects without listed properties and objects that require a
        property that they do not list stay open.

        Properties come in the order in which the schema lists them. A number of 40 characters ends as soon as the
        schema allows it, and white space is limited to indentation: some models continue both without end. Raises
        RequestError.
        """
        require_bool("additional_properties", additional_properties)
        try:
            text = schema if isinstance(schema, str) else json.dumps(_schema(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema cannot be written as JSON ({error}); simplify it") from error
        grammar = cls("json_schema", text)
        return grammar if additional_properties else cls("json_schema", _close_json(text))

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Self:
        """Return the grammar whose texts are exactly `texts`. Raises RequestError unless they are non-empty texts."""
        alternatives = [] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
        if not alternatives or not all(isinstance(text, str) and text for text in alternatives):
            shown = texts if isinstance(texts, Sized) or not isinstance(texts, Iterable) else alternatives
            raise RequestError(f'choices are a list of texts, such as ["yes", "no"], not {shown!r}')
        alternatives_text = " | ".join(json.dumps(text, ensure_ascii=False) for text in alternatives)
        return cls(
            "lark", f"start: TEXT\nTEXT: {alternatives_text}"
        )  # one terminal, as a rule has at most 2,000 alternatives

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of a regular expression that matches whole texts. Raises RequestError."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return a context-free grammar of texts that its rule `start` derives. Raises RequestError."""
        return cls("lark", grammar)


def _close_json(text: str) -> str:
    """Return a JSON schema with its objects closed. Text that is no JSON object, or nested too deeply, is unchanged."""
    try:
        schema = json.loads(text)
        closed = closed_objects(schema) if isinstance(schema, dict) else schema
        return text if closed == schema else json.dumps(closed)
    except (ValueError, RecursionError):
        return text


def _schema(schema: Any) -> Any:
    """Return a schema that `json.dumps` accepts. Models and type adapters of pydantic generate it."""
    if schema is None:
        return {"type": "object"}
    if get_origin(schema) and "pydantic" in sys.modules:  # list[Model], say
        from pydantic import TypeAdapter

        schema = TypeAdapter(schema)
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict | bool) and not schema.keys() - WRAPPER:
        raise RequestError('the schema is wrapped as in "response_format"; pass what its "schema" holds')
    generate_schema = getattr(schema, "model_json_schema", None) or getattr(schema, "json_schema", None)
    return generate_schema() if callable(generate_schema) else schema
