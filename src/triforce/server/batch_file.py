"""Requests from a file, in OpenAI's batch format, put to the application as if they had come over a socket.

Each line of the input is answered by one line of the output, in the order in which they are done. A run that was ended,
however, can be taken up: what was answered is not asked again, and what was refused is, as it may have been mended.
"""

from __future__ import annotations

import asyncio
import json
from typing import BinaryIO

from starlette.types import ASGIApp, Message

from triforce.server.batch_lines import BatchLine
from triforce.server.batch_output import Answers, Response
from triforce.server.limits import Limits

AT_ONCE = 32
"""Requests that are under way together for an engine, which has them wait for one another."""
LIMITS = Limits(seconds=float("inf"), waiting=AT_ONCE * Limits().prompts, max_itl=2.0)
"""Whoever runs a batch waits for it, and is not refused for it."""


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
