"""Arguments that a format writes without JSON: texts as they are, between marks; other values as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from triforce.interface.grammar import ANNOTATIONS, ANY_TEXT, resolve_reference
from triforce.server.answers.call_format import CallableFunction
from triforce.server.answers.json_calls import decoded_json, valid_json
from triforce.server.answers.marks import Marks
from triforce.structured_output.compiler import schema_grammar

PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Constants as some templates, and so their models, write them."""
JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
MAX_REFERENCES = 16
"""References that are followed from one to the next."""
_WRITABLE_NAME = re.compile(r"[\w.$-]+")
_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def properties_of(schema: Any) -> dict[str, Any]:
    """Return the schemas of an object's listed properties; none for a schema that lists none, or is none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def required_names(schema: Any) -> set[str]:
    """Return the names of the properties that an object must have."""
    required = schema.get("required") if isinstance(schema, dict) else None
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def property_schema(schema: Any, name: str) -> Any:
    """Return the schema of a property, with a reference to another part of `schema` resolved; None if it has none."""
    return resolved(properties_of(schema).get(name), schema)


def resolved(part: Any, root: Any) -> Any:
    """Return a part of a schema, or what it refers to in `root`; a reference that leads nowhere stays."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(part, dict) or "$ref" not in part or not isinstance(root, dict):
            return part
        try:
            target = resolve_reference(root, part["$ref"])
        except LookupError:
            return part
        part = (
            {name: value for name, value in part.items() if name != "$ref"} | target if isinstance(target, dict) else {}
        )
    return {}


def types_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; all where it does not say so plainly."""
    types = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {kind for kind in types if isinstance(kind, str)} or set(JSON_TYPES)
    values = listed_values(schema)
    if values is not None:
        return {type_of(value) for value in values}
    alternatives = alternatives_of(schema)
    return set[str]().union(*map(types_of, alternatives)) if alternatives else set(JSON_TYPES)


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return "null" if value is None else _TYPES[type(value)]


def listed_values(schema: Any) -> list[Any] | None:
    """Return the only values that a schema allows by `const` or `enum`, or None if it lists none."""
    values = ([schema["const"]] if "const" in schema else schema.get("enum")) if isinstance(schema, dict) else None
    return values if isinstance(values, list) else None


def alternatives_of(schema: Any) -> list[Any]:
    """Return the alternatives of `anyOf` or `oneOf`."""
    alternatives = schema.get("anyOf", schema.get("oneOf")) if isinstance(schema, dict) else None
    return alternatives if isinstance(alternatives, list) else []


def json_of(written: str, schema: Any) -> str:
    """Return the JSON of a value as a model wrote it: its own characters, but a text gets quotes.

    schema: of the value. It decides whether `5` is a number or a text; without a decision it is a number.
    """
    types = types_of(schema)
    text = json.dumps(written, ensure_ascii=False)
    raw = PYTHON_CONSTANTS.get(written.strip(), written.strip())
    try:
        value = decoded_json(raw)
    except (ValueError, RecursionError):
        return text
    values = listed_values(schema)
    if values is not None:
        return text if written in values or value not in values else valid_json(raw)
    if "string" in types and (isinstance(value, str) or not _fits(value, types)):
        return text
    return valid_json(raw)


def _fits(value: Any, types: set[str]) -> bool:
    is_integral = isinstance(value, float) and value.is_integer()
    kinds = {type_of(value)} | ({"number"} if type_of(value) == "integer" else {"integer"} if is_integral else set())
    return bool(kinds & types)


def object_of(members: Mapping[str, str]) -> str:
    """Return the JSON of an object whose values are JSON."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members.items()) + "}"


def listed_properties(schema: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the schema of each property of an object, and whether it is required.

    Raises ValueError for an object with other constraints: its properties are written one by one.
    """
    root = resolved(schema, schema)
    properties = root.get("properties", {})
    other_keywords = root.keys() - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}
    reason = f"{min(other_keywords)!r} is not supported" if other_keywords else ""
    if not isinstance(properties, dict):
        reason = "'properties' must be an object"
    elif unlisted := required_names(root) - properties.keys():
        reason = f"{min(unlisted)!r} is required and not listed in 'properties'"
    elif unwritable := [name for name in properties if not _WRITABLE_NAME.fullmatch(name)]:
        reason = f"the name {unwritable[0][:60]!r} cannot be written without quotes"
    if reason:
        raise ValueError(f"this model writes arguments one by one, and {reason}")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    listed = {}
    for name, part in properties.items():
        part_schema = resolved(part, schema)
        listed[name] = (
            (part_schema if isinstance(part_schema, dict) else {}) | definitions,
            name in required_names(root),
        )
    return listed


def value_rule(name: str, schema: dict[str, Any], text_rule: str) -> str:
    """Return the body of the rule of a value: JSON, or a text that is written as it is.

    text_rule: name of the rule of any text. Raises ValueError for a text with further constraints.
    """
    types = types_of(schema)
    if "string" not in types:
        return schema_grammar(schema)
    values = listed_values(schema)
    if values is not None:
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in written)
    definitions = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
    if alternatives := alternatives_of(schema):
        parts = [resolved(part, schema) for part in alternatives]
        bodies = [value_rule(name, (part if isinstance(part, dict) else {}) | definitions, text_rule) for part in parts]
        return text_rule if text_rule in bodies else " | ".join(bodies)
    constraints = schema.keys() - ANNOTATIONS - {"type"}
    if constraints:
        reason = "as this model writes texts without quotes"
        raise ValueError(f"{min(constraints)!r} of {name!r} is not supported, {reason}")
    return text_rule


def text_rule(name: str, marks: Marks, ending: str) -> str:
    """Return the rule of any text up to `ending`, which is a part of the rule."""
    terms = marks.terms(ending)
    if terms.startswith("<["):  # text holds no token of a mark
        return f"{name}: {ANY_TEXT} {terms}"
    return f"{name}[suffix={json.dumps(ending, ensure_ascii=False)}]: {ANY_TEXT}"


def argument_rules(
    marks: Marks, function: CallableFunction, index: int, opening: Callable[[str], str], ending: str
) -> tuple[str, list[str]]:
    """Return the terms of a function's arguments that are written one by one, and the rules that they name.

    index: of the function. opening: returns the text in front of the argument of a name. ending: text behind each.
    Raises ValueError for parameters that cannot be written in this way.
    """
    terms = []
    rules = []
    for i, (name, (schema, is_required)) in enumerate(listed_properties(function.closed_parameters).items()):
        text = f"text_{index}_{i}"
        value = value_rule(name, schema, text)
        if value == text:
            rules.append(text_rule(text, marks, ending))
            argument = f"{marks.terms(opening(name))} {text}"
        else:
            rules.append(f"value_{index}_{i}: {value}")
            argument = f"{marks.terms(opening(name))} value_{index}_{i} {marks.terms(ending)}"
        terms.append(argument if is_required else f"({argument})?")
    return " ".join(terms), rules
