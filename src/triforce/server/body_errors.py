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


def field_of(body: Any, error: dict[str, Any]) -> str:
    """Return the place of an error in words of the body: without types that were tried, and tags of what was chosen."""
    parts, tags, place = list[str](), set[int](), place_of(error)
    for n, part in enumerate(place, 1):
        if len(parts) not in tags and _chosen_by_type(parts):
            tags.add(len(parts))
        elif isinstance(body, dict) and part in body:
            parts.append(part)
            body = body[part]
        elif isinstance(body, list) and part.isdecimal() and int(part) < len(body):
            parts.append(part)
            body = body[int(part)]
        elif n == len(place) and error["type"] == "missing":
            parts.append(part)
    return ".".join(parts)


def is_null(body: Any, field: str) -> bool:
    """Return whether a body has null at this place."""
    for part in field.split("."):
        body = body[int(part)] if isinstance(body, list) else body.get(part, "")
    return body is None


def _chosen_by_type(parts: list[str]) -> bool:
    """Return whether what is here is one of several objects, so that the place goes on with its type."""
    return parts in (["response_format"], ["text", "format"]) or (parts[:1] == ["input"] and len(parts) == 2)


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
