"""The input of a batch: a request on each line, in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO

from triforce.text_encoding import NotTextError, decode

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

    def digest(self, model: str) -> str | None:
        """Return a hex digest of the request and of the model's identity; None for a line in error."""
        request = "\n".join([model, self.url, ""]).encode() + self.body
        return None if self.error is not None else blake2b(request, digest_size=16).hexdigest()


def batch_lines(file: BinaryIO) -> Iterator[BatchLine]:
    """The lines of an input that are not blank."""
    numbers: dict[Name, int] = {}
    for number, text in enumerate(file, 1):
        if text.strip():
            line = _parsed(number, text)
            if line.name in numbers:
                error = f"custom_id {line.name!r} stands in line {numbers[line.name]} already; give each its own"
                line = BatchLine(number, error=error)
            numbers[line.name] = number
            yield line


def _parsed(number: int, text: bytes) -> BatchLine:
    try:
        request = json.loads(decode(text.rstrip()))
    except NotTextError as error:
        return BatchLine(number, error=f"line {number} {error}")
    except (ValueError, RecursionError) as error:
        return BatchLine(number, error=f"line {number} is not JSON: {_told(error)}")
    name = request.get("custom_id") if isinstance(request, dict) else None
    if not isinstance(name, str) or not name:
        return BatchLine(number, error=f"line {number} is no JSON object with a custom_id, which is a text")
    body, url = request.get("body"), request.get("url")
    if request.get("method") != "POST" or url not in PATHS:
        return BatchLine(name, error=f"line {number}: method must be POST, and url one of {', '.join(PATHS)}")
    if not isinstance(body, dict) or body.get("stream"):
        return BatchLine(name, error=f"line {number}: body must be a JSON object, without stream")
    return BatchLine(name, url, json.dumps(body).encode())


def _told(error: Exception) -> str:
    """Return why a text is not JSON. Its parser counts lines in it, of which there is one."""
    return f"{error.msg}, at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
