"""Requests from a file, in OpenAI's batch format, put to the application as if they had come over a socket.

Each line of the input is answered by one line of the output, in the order in which they are done. A run that was ended,
however, can be taken up: what was answered is not asked again, and what was refused is, as it may have been mended.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from starlette.types import ASGIApp, Message

from triforce.errors import RequestError
from triforce.server.limits import Limits
from triforce.whole_file import whole_file

AT_ONCE = 32
"""Requests that are under way together for an engine, which has them wait for one another."""
LIMITS = Limits(seconds=float("inf"), waiting=AT_ONCE * Limits().prompts, max_itl=2.0)
"""Whoever runs a batch waits for it, and is not refused for it."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_BEGINNING = b'{"id": "batch_req_'

Response = dict[str, Any]
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
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, error=f"line {number} is not JSON: {error}")
    name = request.get("custom_id") if isinstance(request, dict) else None
    if not isinstance(name, str) or not name:
        return BatchLine(number, error=f"line {number} is no JSON object with a custom_id, which is a text")
    body, url = request.get("body"), request.get("url")
    if request.get("method") != "POST" or url not in PATHS:
        return BatchLine(name, error=f"line {number}: method must be POST, and url one of {', '.join(PATHS)}")
    if not isinstance(body, dict) or body.get("stream"):
        return BatchLine(name, error=f"line {number}: body must be a JSON object, without stream")
    return BatchLine(name, url, json.dumps(body).encode())


@dataclass(slots=True)
class Tally:
    """Lines by what became of them."""

    answered: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons for refusals, with counts."""

    @property
    def refused(self) -> int:
        return self.reasons.total()


def resume(output: Path) -> set[Name]:
    """Return the names of the lines that an output has answered; drop refusals and a torn last line from the file.

    Raises RequestError for a file that is no output of a batch, and leaves it as it is.
    """
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole, _, torn = content.rpartition(b"\n")
    try:
        lines = {line: _answered(json.loads(line)) for line in whole.splitlines()}
    except (ValueError, TypeError, KeyError, RecursionError):
        lines, torn = {}, b"not ours"
    if not torn.startswith(_BEGINNING[: len(torn)]):
        raise RequestError(f"{output} holds something else than answers of a batch; name another file with -o")
    kept = [line for line, name in lines.items() if name is not None]
    if torn or len(kept) < len(lines):
        with whole_file(output) as partial:
            partial.write_bytes(b"".join(line + b"\n" for line in kept))
    return {name for name in lines.values() if name is not None}


def _answered(answer: Any) -> Name | None:
    """Return the name of the line that this answers; None for a refusal."""
    name: Name = answer["custom_id"] or answer["error"]["line"]
    return name if answer["response"] and _good(answer["response"]) else None


def _good(response: Response) -> bool:
    return bool(response["status_code"] == 200)


class Answers(AbstractContextManager["Answers"]):
    """An output that is open: what it has not answered is asked of it, and each answer is added to it at once."""

    def __init__(self, path: Path, on_line: Callable[[], object]) -> None:
        """`on_line` is called once for each line of the input. Raises RequestError as `resume` does."""
        self.tally = Tally()
        self._done, self._on_line, self._file = resume(path), on_line, path.open("ab")

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def missing(self, source: BinaryIO) -> Iterator[BatchLine]:
        """Yield the lines that have no answer yet, and count the others."""
        for line in batch_lines(source):
            if line.name not in self._done:
                yield line
            else:
                self.tally.skipped += 1
                self._on_line()

    def add(self, line: BatchLine, response: Response | None = None) -> None:
        """Write the answer to a line; `response` is None for a line that is itself in error."""
        named, error = isinstance(line.name, str), None
        if line.error is not None:
            error = {"code": line.code, "message": line.error} | ({} if named else {"line": line.name})
        head = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.name if named else None}
        answer = head | {"response": response, "error": error}
        self._file.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if response is None or not _good(response):
            self.tally.reasons[str(response["body"]["error"]["message"] if response else line.error)] += 1
        else:
            self.tally.answered += 1
        self._on_line()


async def run(app: ASGIApp, source: BinaryIO, answers: Answers) -> None:
    """Answer each line of `source` that is not answered yet."""
    room = asyncio.Semaphore(AT_ONCE)

    async def work(line: BatchLine) -> None:
        try:
            response = None if line.error is not None else await post(app, line.url, line.body)
        finally:
            room.release()
        answers.add(line, response)

    try:
        async with asyncio.TaskGroup() as group:
            for line in answers.missing(source):
                await room.acquire()
                group.create_task(work(line))
    except ExceptionGroup as errors:  # a full disk, say
        raise errors.exceptions[0] from None


async def post(app: ASGIApp, path: str, body: bytes) -> Response:
    """Return the application's answer to a POST, as the output file has it."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # nobody hangs up here
        return unread.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app(scope | {"headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    start, *rest = sent
    text = b"".join(message.get("body", b"") for message in rest)
    request_id = dict(start["headers"])[b"x-request-id"].decode()
    return {"status_code": start["status"], "request_id": request_id, "body": json.loads(text)}
