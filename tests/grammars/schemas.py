"""Schemas of many kinds: some written by hand, keyword by keyword, others drawn."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:
    """An object with all of these properties and no others."""
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
"""Each kind of value, each way to bound it, and each way to join schemas."""


def keywords(schema: Any) -> set[str]:
    """All that occur in a schema, at any depth; names of properties are none."""
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            found |= keywords([*value.values()])
        elif key not in ("const", "enum", "default"):
            found |= keywords(value)
    return found


def drawn(count: int) -> list[Schema]:
    """Different ones, always the same."""
    chance, found = Random(0), list[Schema]()
    while len(found) < count:
        schema = _instance(_SCHEMAS, chance)
        if schema not in found:
            found.append(schema)
    return found


def _instance(schema: Schema, chance: Random) -> Any:
    """What a schema of the kinds below allows. (hypothesis-jsonschema does not run with today's hypothesis.)"""
    if "anyOf" in schema:
        return _instance(chance.choice(schema["anyOf"]), chance)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else chance.choice(schema["enum"])
    if schema["type"] == "object":
        return {name: _instance(value, chance) for name, value in schema["properties"].items()}
    if schema["type"] == "integer":
        return chance.randint(schema["minimum"], schema["maximum"])
    made: list[Any] = []
    for _ in range(chance.randint(schema["minItems"], schema["maxItems"])):
        one = _instance(schema["items"], chance)
        if not schema.get("uniqueItems") or one not in made:
            made.append(one)
    return made


def _between(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_WORDS: Schema = {"enum": ["the", "cat", "sat", 0, -7, 2.5, True, None, "\u00e9\n", [], {"on": "mat"}]}
_LEAVES = [
    _object(type={"const": "string"}, minLength=_between(0, 3), maxLength=_between(3, 9)),
    _object(type={"const": "string"}, pattern={"enum": ["^[a-c]{1,4}$", "^(the|cat) [0-9]{2}$", "^x?$"]}),
    _object(type={"const": "string"}, format={"enum": ["date", "time", "date-time", "uuid", "ipv4", "ipv6"]}),
    _object(type={"const": "integer"}, minimum=_between(-99, 0), maximum=_between(0, 9999)),
    _object(type={"const": "integer"}, exclusiveMinimum=_between(-99, 0), exclusiveMaximum=_between(2, 99)),
    _object(type={"const": "number"}, minimum=_between(-9, 0), maximum=_between(1, 9)),
    _object(type={"enum": ["boolean", "null", ["boolean", "null"]]}),
    _object(enum=_list(_WORDS, 1, 4) | {"uniqueItems": True}),
    _object(const=_WORDS),
]  # fmt: skip
_LEAF: Schema = {"anyOf": _LEAVES}
_NAMED = {"type": "object", "properties": dict.fromkeys("abc", _LEAF), "additionalProperties": False}
_FEW = {"enum": [[], ["a"], ["b", "a"], ["c"]]}
_JOINED = [
    _object(type={"const": "array"}, items=_LEAF, minItems=_between(0, 2), maxItems=_between(2, 4)),
    _object(type={"const": "array"}, prefixItems=_list(_LEAF, 2, 3), items={"const": False}, minItems={"const": 2}),
    _object(type={"const": "object"}, properties=_NAMED | {"required": [*"abc"]}, required=_FEW,
            additionalProperties={"const": False}),
    _object(type={"const": "object"}, additionalProperties=_LEAF, maxProperties=_between(1, 3)),
    _object(anyOf=_list(_LEAF, 1, 3)),
]  # fmt: skip
_PLACED = {"type": "object", "properties": {"a": {"anyOf": _JOINED}, "b": _LEAF}, "required": [*"ab"],
           "additionalProperties": False}  # fmt: skip
_SCHEMAS: Schema = {
    "anyOf": [*_LEAVES, *_JOINED, _object(type={"const": "object"}, properties=_PLACED,
                                          required={"const": ["a"]}, additionalProperties={"const": False})]
}  # fmt: skip
