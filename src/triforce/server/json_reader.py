"""A program that reads JSON apart from the server: its parser holds the interpreter's lock, and may make any number of
objects. Called with the most objects and arrays, and the most values; it counts both before it makes any.

It imports nothing of triforce, so that it starts at once.
"""

from __future__ import annotations

import json
import marshal
import os
import re
import sys
from typing import Any

NICENESS = 5
"""Texts that are being made go first."""
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, or one that has no end: linear in its length."""

COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""Beginnings of what gzip and zstd make."""


def parsed(body: bytes, limits: tuple[int, int] | None = None) -> tuple[str, Any]:
    """Return what came of it (`value`, or a reason why there is none), and what belongs to that.

    limits: the most objects and arrays, and the most values; None counts neither. Reasons: `compressed`, `encoding`,
    `containers`, `values`, `syntax`, `unreadable`.
    """
    if body.startswith(COMPRESSED):
        return "compressed", None
    try:
        text = body.decode(json.detect_encoding(body))
    except UnicodeDecodeError as error:
        return "encoding", error.start
    try:
        return (limits and _excess(text, *limits)) or ("value", json.loads(text))
    except json.JSONDecodeError as error:
        return "syntax", f"{error.msg.removesuffix(' at')}, at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        return "unreadable", None


def _excess(text: str, most_containers: int, most_values: int) -> tuple[str, int] | None:
    """Return which limit a text is beyond, and by which count; None for a text within both."""
    bare = STRING.sub("", text)
    containers = bare.count("[") + bare.count("{")
    if containers > most_containers:
        return "containers", containers
    values = containers + bare.count(",")
    return ("values", values) if values > most_values else None


def main() -> None:
    """Read JSON from stdin, and write what `parsed` returns to stdout, by `marshal`."""
    os.nice(NICENESS)
    outcome = parsed(sys.stdin.buffer.read(), (int(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.buffer.write(marshal.dumps(outcome))


if __name__ == "__main__":
    main()
