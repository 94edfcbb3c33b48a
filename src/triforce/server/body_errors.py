"""Errors of the schema in words of a body: where they are, how far the body was understood, and what is wrong."""

from __future__ import annotations

from typing import Any


def reach_of(error: dict[str, Any]) -> tuple[int, list[int]]:
    """Return how far a body was understood before this error: how deep, and up to which items."""
    place = place_of(error)
    return len(place), [int(part) for part in place if part.isdecimal()]


def place_of(error: dict[str, Any]) -> list[str]:
    """Return the place of an error in a body, as the schema has it."""
    return [str(part) for part in error["loc"][1:]]


def field_of(body: Any, place: list[str]) -> str:
    """Return a place in words of the body: without the types that were tried, and tags of what was chosen by one."""
    parts = []
    for n, part in enumerate(place, 1):
        inside = body.get(part) if isinstance(body, dict) else None
        if isinstance(body, list) and part.isdecimal() and int(part) < len(body):
            inside = body[int(part)]
        if inside is not None or (n == len(place) and "[" not in part and part != "str"):
            parts.append(part)
            body = inside
    return ".".join(parts)


def text_of(error: dict[str, Any]) -> str:
    """Return what an error of the schema says, without words of Python."""
    about = error.get("ctx", {})
    match error["type"]:
        case "too_long":
            return f"at most {about['max_length']} are taken; send fewer"
        case "too_short":
            return f"it is too short; send at least {about['min_length']}"
        case "model_attributes_type" | "model_type" | "dict_type":
            return "Input should be an object"
        case "union_tag_invalid":
            return f"type must be one of {about['expected_tags']}"
        case "union_tag_not_found":
            return "it must be an object with a type"
    return str(error["msg"])
