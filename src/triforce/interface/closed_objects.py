"""Object schemas that take only the properties that they list, as OpenAI's structured outputs and other engines do.

By the JSON Schema standard an object may have any other property too, so a model that is held to a schema may invent
some without end. Here an object schema that lists properties and is silent about others is closed. It stays open
where closing it could refuse what the schema describes elsewhere: see `closed_objects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any
from urllib.parse import unquote

JSONSchema = dict[str, Any]

ANNOTATIONS = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
    "examples", "readOnly", "title", "writeOnly", "x-guidance",
}  # fmt: skip
"""Keywords that describe no value."""
COMPOSITIONS = {"allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
"""Keywords whose schemas describe the same value as the schema that they stand in."""
OTHER_PROPERTIES = {
    "additionalProperties", "const", "dependentRequired", "enum", "patternProperties", "propertyNames",
    "unevaluatedProperties",
}  # fmt: skip
"""Keywords that say something about properties beside those listed."""
OF_NAMES = {"dependencies", "dependentSchemas", "patternProperties", "properties"}
"""Keywords whose values have a schema for each name."""
OF_SCHEMAS = {
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
"""Keywords whose values are a schema, or a list of schemas."""
ELSEWHERE = {"$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"}
"""Keywords by which a reference may lead where this module does not follow it."""


def closed_objects(schema: JSONSchema) -> JSONSchema:
    """Return a schema with `additionalProperties: false` in object schemas that list properties and not others.

    An object schema stays open where it is part of a composition (in a schema of `COMPOSITIONS`, beside one, or
    referenced from there or beside other keywords); an alternative beside `null` is no composition. It also stays open
    with keywords of `OTHER_PROPERTIES`, and where it requires properties that it does not list. The whole schema stays
    as it is if its references lead beyond JSON pointers into itself. Raises RecursionError for one nested too deeply.
    """
    root = deepcopy(schema)
    for part, is_composed in _described(root):
        if not is_composed and _lists_all(part):
            part["additionalProperties"] = False
    return root


def _described(root: JSONSchema) -> list[tuple[JSONSchema, bool]]:
    """Return the schemas that describe values, and whether each is part of a composition; none if one is not found."""
    states: dict[int, tuple[JSONSchema, bool]] = {}
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        part, is_composed = waiting.pop()
        known = states.get(id(part))
        if not isinstance(part, dict) or (known and known[1] >= is_composed):
            continue
        if ELSEWHERE & part.keys() or ("$id" in part and part is not root):
            return []
        states[id(part)] = part, is_composed
        try:
            waiting += _parts(root, part, is_composed)
        except LookupError:
            return []
    return [*states.values()]


def _parts(root: JSONSchema, part: JSONSchema, is_composed: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the schemas that a schema consists of, and whether they are part of a composition. Raises LookupError."""
    constraints = part.keys() - ANNOTATIONS
    optional = _optional(part) if len(constraints) == 1 else None
    if optional is not None:
        yield optional, is_composed
        return
    beside = is_composed or bool(constraints & COMPOSITIONS) or ("$ref" in part and len(constraints) > 1)
    if "$ref" in part:
        yield _resolved(root, part["$ref"]), beside
    if beside and not is_composed:  # this schema itself
        yield part, True
    inner = beside or "patternProperties" in part or "contains" in part
    for keyword in constraints:
        for value in _schemas(part, keyword):
            yield value, inner


def _optional(part: JSONSchema) -> Any:
    """Return the one alternative beside `null`; None where there are others."""
    alternatives = part.get("anyOf", part.get("oneOf"))
    if not isinstance(alternatives, list):
        return None
    others = [alternative for alternative in alternatives if alternative != {"type": "null"}]
    return others[0] if len(others) == 1 else None


def _schemas(part: JSONSchema, keyword: str) -> Iterable[Any]:
    """Return the schemas in the value of a keyword; none for a keyword that holds none."""
    value = part[keyword]
    if keyword in OF_NAMES:
        return value.values() if isinstance(value, dict) else ()
    if keyword in OF_SCHEMAS:
        return value if isinstance(value, list) else (value,)
    return ()


def _resolved(root: JSONSchema, reference: Any) -> Any:
    """Return what a JSON pointer leads to. Raises LookupError."""
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


def _lists_all(part: JSONSchema) -> bool:
    """Return whether the properties that a schema lists are all that its objects need."""
    listed = part.get("properties")
    if not isinstance(listed, dict) or OTHER_PROPERTIES & part.keys():
        return False
    required, least = part.get("required", []), part.get("minProperties", 0)
    enough = isinstance(least, int | float) and least <= len(listed)
    return enough and isinstance(required, list) and all(isinstance(name, str) and name in listed for name in required)
