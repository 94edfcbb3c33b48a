"""A program that parses JSON outside of the server's process, as the parser holds the GIL and may create any number of
objects.

Arguments: the maximal number of objects and arrays, and of values. It counts both before it parses. It imports nothing
of triforce, so it starts fast.
"""

from __future__ import annotations

import json
import marshal
import math
import os
import re
import sys
from typing import Any

NICENESS = 5
"""Lowers the priority of the process below that of running texts."""
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, complete or unterminated. Matching is linear in its length."""

COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""Magic numbers of gzip and zstd."""


def parse(body: bytes, limits: tuple[int, int] | None = None) -> tuple[str, Any]:
    """Return an outcome and its argument: `value` and the parsed value, or a kind of error and its details.

    limits: the maximal number of objects and arrays, and of values; None counts neither. Errors: `compressed`,
    `encoding`, `containers`, `values`, `syntax`, `unreadable`.
    """
    if body.startswith(COMPRESSED):
        return "compressed", None
    try:
        text = body.decode(json.detect_encoding(body))
    except UnicodeDecodeError as error:
        return "encoding", error.start
    try:
        return (limits and _excess(text, *limits)) or ("value", _read(text))
    except json.JSONDecodeError as error:
        return "syntax", f"{error.msg.removesuffix(' at')}, at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        return "unreadable", None


def _read(text: str) -> Any:
    """Return the value of JSON. Raises ValueError, also for numbers that JSON cannot write again."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written[:20]} is no finite number")
    return number


def _excess(text: str, most_containers: int, most_values: int) -> tuple[str, int] | None:
    """Return the name of the exceeded limit and the count; None for a text within both limits."""
    bare = STRING.sub("", text)
    containers = bare.count("[") + bare.count("{")
    if containers > most_containers:
        return "containers", containers
    values = containers + bare.count(",")
    return ("values", values) if values > most_values else None


def main() -> None:
    """Parse JSON from stdin, and write the result of `parse` to stdout, serialized by `marshal`."""
    os.nice(NICENESS)
    outcome = parse(sys.stdin.buffer.read(), (int(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.buffer.write(marshal.dumps(outcome))


if __name__ == "__main__":
    main()
