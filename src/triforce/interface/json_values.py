"""Values as JSON keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def json_value(value: Any) -> Any:
    """Return a value in the types of JSON: objects become dicts of their fields, and numbers without end None."""
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(part) for key, part in value.items()}
    if hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
