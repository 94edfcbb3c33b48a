"""JSON values of wrong types and sizes, and objects with some of them in place of their own."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

NUMBERS = [
    0, 1, 2, 3, 5, 7, 8, 16, 24, 63, 64, 65, 72, 96, 97, 128, 255, 4096, 10_000, 65_535, 65_536, 1 << 20, 10**9,
    (1 << 31) - 2, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 64, 10**400, -1, -(1 << 31), 0.5, 1e-300, 1e12,
    1e308, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
TEXTS = [
    "",
    "a",
    "\n",
    "\x1b[31m",
    "a\r\nb",
    "\u202e",
    "\ud800",
    "é" * 300,
    "default",
    "yarn",
    "../..",
    "\0",
    "x" * 9000,
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": {"b": [1]}}, [1, 2], [0.5] * 8, ["a"], [1e30] * 8]


DEEP = "@deep@"
"""Placeholder of a value too deep to build here, see `as_json`."""


def as_json(value: Any) -> str:
    """Return a value as JSON, with NaN and infinities as Python's library writes them."""
    return json.dumps(value).replace(f'"{DEEP}"', '[{"a":' * 50_000 + "1" + "}]" * 50_000)


def hostile_value(random: Random) -> Any:
    """Return a number, a text, or another value, sometimes deep or long."""
    match random.randrange(8):
        case 0:
            return random.choice(TEXTS)
        case 1:
            return copy.deepcopy(random.choice(OTHERS))
        case 2 if random.random() < 0.2:
            return random.choice([nested(50), nested(800), DEEP])
        case 3 if random.random() < 0.2:
            return [random.choice(NUMBERS) for _ in range(random.choice([10, 10_000]))]
        case _:
            return random.choice(NUMBERS)


def nested(depth: int) -> Any:
    """Return a value of a depth."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def spoiled(random: Random, values: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an object with one to three fields, its own or of `names`, changed or removed at any depth."""
    values = copy.deepcopy(values)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        place = values
        while (inner := [value for value in place.values() if isinstance(value, dict)]) and random.random() < 0.4:
            place = random.choice(inner)
        name = random.choice([*place, *names]) if place else random.choice(names)
        if random.random() < 0.1:
            place.pop(name, None)
        elif type(place.get(name)) is int and random.random() < 0.4:
            place[name] = max(0, random.choice([place[name] - 1, place[name] + 1, place[name] * 2, place[name] // 2]))
        else:
            place[name] = hostile_value(random)
    return values
