"""The lines of a batch's input, in OpenAI's format: requests, or what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

Name = str | int
"""Identity of a line: its custom_id, or its number if it has none."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input: a request, or its error."""

    name: Name
    url: str = ""
    body: bytes = b""
    error: str | None = None
    code: str = "invalid_line"


def jobs(file: BinaryIO) -> Iterator[BatchLine]:
    """The lines of an input that are not blank."""
    seen: dict[Name, int] = {}
    for number, line in enumerate(file, 1):
        if line.strip():
            job = _job(number, line)
            if job.name in seen:
                job = BatchLine(
                    number, error=f"custom_id {job.name!r} stands in line {seen[job.name]} already; give each its own"
                )
            seen[job.name] = number
            yield job


def _job(number: int, line: bytes) -> BatchLine:
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, error=f"line {number} is not JSON: {error}")
    name = asked.get("custom_id") if isinstance(asked, dict) else None
    if not isinstance(name, str) or not name:
        return BatchLine(number, error=f"line {number} is no JSON object with a custom_id, which is a text")
    body, url = asked.get("body"), asked.get("url")
    if asked.get("method") != "POST" or url not in PATHS:
        return BatchLine(name, error=f"line {number}: method must be POST, and url one of {', '.join(PATHS)}")
    if not isinstance(body, dict) or body.get("stream"):
        return BatchLine(name, error=f"line {number}: body must be a JSON object, without stream")
    return BatchLine(name, url, json.dumps(body).encode())
