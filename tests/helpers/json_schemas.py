"""JSON schemas: some written by hand for each keyword, others drawn; and keywords that are not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SHORT: Schema = {"type": "string", "maxLength": 6}
WRITTEN: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"], "minimum": -5, "maximum": 5},
    {"const": {"the": ["cat", 1.5, None]}},
    {"enum": ["the", 7, [True], {"a": "\u6771\u4eac \"quoted\""}]},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 1000},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number", "minimum": 0.25, "maximum": 2.5},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^(the|a) (cat|hat)s?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [SHORT, {"type": "integer", "maximum": 9, "minimum": 0}], "items": False,
     "minItems": 2},
    {"type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}},
    _object(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    {"type": "object", "properties": {"a": {"type": "null"}, "b": SHORT}, "required": ["b"],
     "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "required": ["yes"], "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}, "additionalProperties": False,
     "minProperties": 1, "maxProperties": 2},
    {"anyOf": [{"type": "boolean"}, _object(kind={"const": "b"})]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 33}]},
    {"$ref": "#/$defs/word", "$defs": {"word": {"enum": ["cat", "hat"]}}},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}, "$ref": "#/$defs/tree"},
    {"definitions": {"yes": {"const": True}}, **_object(both={"$ref": "#/definitions/yes"})},
    {"title": "a cat", "description": "what is said of it", "type": "string", "maxLength": 3, "default": "cat"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/cat", "type": "null"},
]  # fmt: skip
"""Schemas of each kind of value, each bound on it, and each way to join schemas."""
REFUSED: dict[str, Any] = {
    "contains": {}, "minContains": 1, "maxContains": 1, "dependencies": {}, "dependentRequired": {},
    "dependentSchemas": {}, "$dynamicAnchor": "a", "$dynamicRef": "#a", "if": {}, "then": {}, "else": {}, "not": {},
    "propertyNames": {}, "unevaluatedItems": False, "unevaluatedProperties": False, "uniqueItems": True,
}  # fmt: skip
"""Unsupported keywords of draft 2020-12, with a value of each."""


def keywords(schema: Any) -> set[str]:
    """Return all keywords of a schema, at any depth; names of properties are no keywords."""
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    if not isinstance(schema, dict):
        return set()
    names = set(schema)
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            names |= keywords([*value.values()])
        elif key not in ("const", "enum", "default"):
            names |= keywords(value)
    return names


def two_hundred() -> list[Schema]:
    """Return schemas, half from JSON-Schema-Test-Suite, half by hypothesis-jsonschema; the file tells how.

    They are stored, because hypothesis-jsonschema does not run with the hypothesis of the other tests.
    """
    suites = json.loads((Path(__file__).parents[1] / "data" / "json_schema_suite.json").read_text(encoding="utf-8"))
    suite = [case["schema"] for case in suites["JSON-Schema-Test-Suite"]["schemas"]]
    return [*suite, *suites["hypothesis-jsonschema"]["schemas"]]
