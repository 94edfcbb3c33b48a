"""Arguments that a format writes without JSON: texts as they are, between marks; other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from triforce.interface.grammar import ANNOTATIONS
from triforce.server.answers.call_format import CallableFunction
from triforce.server.answers.marks import Marks
from triforce.structured_output.compiler import schema_grammar

PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Constants as some templates, and so their models, write them."""
_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def types_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; all where it does not say so plainly."""
    if not isinstance(schema, dict):
        return set(_TYPES.values()) | {"null"}
    if "type" in schema:
        return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {"null" if value is None else _TYPES[type(value)] for value in values}
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(alternatives, list):
        return set[str]().union(*map(types_of, alternatives))
    return set(_TYPES.values()) | {"null"}


def json_of(written: str, schema: Any) -> str:
    """Return the JSON of a value as a model wrote it: its own characters, but a text gets quotes.

    schema: of the value. It decides whether `5` is a number or a text; without a decision it is a number.
    """
    types = types_of(schema)
    value_text = written.strip()
    if types != {"string"}:
        value_text = PYTHON_CONSTANTS.get(value_text, value_text)
        try:
            value = json.loads(value_text)
        except (ValueError, RecursionError):
            return json.dumps(written, ensure_ascii=False)
        if not isinstance(value, str) or "string" not in types:
            return value_text
    return json.dumps(written, ensure_ascii=False)


def object_of(members: Mapping[str, str]) -> str:
    """Return the JSON of an object whose values are JSON."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members.items()) + "}"


def listed_properties(schema: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the schema of each property of an object, and whether it is required.

    Raises ValueError for an object with other constraints: its properties are written one by one.
    """
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    other_keywords = schema.keys() - ANNOTATIONS - {"type", "properties", "required", "additionalProperties"}
    if other_keywords or not isinstance(properties, dict) or not isinstance(required, list):
        reason = f"{min(other_keywords)!r} is not supported" if other_keywords else "they list no properties"
        raise ValueError(f"this model writes arguments one by one, and {reason}")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    listed = {}
    for name, part in properties.items():
        part_schema = part if isinstance(part, dict) else {}
        listed[name] = (part_schema | definitions if definitions else part_schema, name in required)
    return listed


def value_rule(name: str, schema: dict[str, Any], text_rule: str) -> str:
    """Return the body of the rule of a value: JSON, or a text that is written as it is.

    text_rule: name of the rule of any text. Raises ValueError for a text with further constraints.
    """
    types = types_of(schema)
    if "string" not in types:
        return schema_grammar(schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in written)
    constraints = schema.keys() - ANNOTATIONS - {"type", "anyOf", "oneOf"}
    if constraints:
        raise ValueError(
            f"{min(constraints)!r} of {name!r} is not supported, as this model writes texts without quotes"
        )
    return text_rule


def text_rule(name: str, marks: Marks, ending: str) -> str:
    """Return the rule of any text up to `ending`, which is a part of the rule."""
    terms = marks.terms(ending)
    if terms.startswith("<["):  # text holds no token of a mark
        return f"{name}: /(?s:.*)/ {terms}"
    return f"{name}[suffix={json.dumps(ending, ensure_ascii=False)}]: /(?s:.*)/"


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
