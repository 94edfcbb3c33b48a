"""Requests from a file, in OpenAI's batch format, put to the application as if they had come over a socket.

Each line of the input is answered by one line of the output, in the order in which they are done. A run that was ended,
however, can be taken up: what was answered is not asked again, and what was refused is, as it may have been mended.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO
from uuid import uuid4

from starlette.types import ASGIApp, Message

from triforce.errors import RequestError
from triforce.server.limits import Limits
from triforce.user_files import NotTextError, decode, read_line
from triforce.whole_file import whole_file

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
        return BatchLine(number, error=f"line {number} is not JSON: {_json_reason(error)}")
    name = request.get("custom_id") if isinstance(request, dict) else None
    if not isinstance(name, str) or not name:
        return BatchLine(number, error=f"line {number} is no JSON object with a custom_id, which is a text")
    body = request.get("body")
    url = request.get("url")
    if request.get("method") != "POST" or url not in PATHS:
        return BatchLine(name, error=f"line {number}: method must be POST, and url one of {', '.join(PATHS)}")
    if not isinstance(body, dict) or body.get("stream"):
        return BatchLine(name, error=f"line {number}: body must be a JSON object, without stream")
    return BatchLine(name, url, json.dumps(body).encode())


def _json_reason(error: Exception) -> str:
    """Return why a text is not JSON. Its parser counts lines in it, of which there is one."""
    return f"{error.msg}, at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


_VALUE = re.compile(r"""'[^']*'|"[^"]*"|0x[0-9a-f]+|-?\d[\d.,]*""")
"""What differs between reasons of one kind: names, and numbers such as those of lines and bytes."""


@dataclass(slots=True)
class Tally:
    """Lines by what became of them."""

    answered: int = 0
    skipped: int = 0
    _refused: Counter[str] = field(default_factory=Counter)
    """Refusals by the kinds of their reasons, with counts."""
    _first_reasons: dict[str, str] = field(default_factory=dict)
    """The first reason of each kind."""

    @property
    def refused(self) -> int:
        return self._refused.total()

    def refuse(self, reason: str, name: str = "") -> None:
        """Count a line that is refused. name: of the line, where the reason does not say which it is."""
        kind = _VALUE.sub("", reason)
        self._refused[kind] += 1
        self._first_reasons.setdefault(kind, f"{name}: {reason}" if name else reason)

    def commonest(self) -> str:
        """Return how many lines are refused for the commonest kind of reason, and the first such reason."""
        (kind, line_count), *other_kinds = self._refused.most_common(2)
        if self.refused == 1:
            return f"The reason: {self._first_reasons[kind]}"
        which = "the commonest" if other_kinds else "one"
        return f"{line_count:,} line{'s' * (line_count > 1)} for {which} reason, the first: {self._first_reasons[kind]}"


_BEGINNING = b'{"id": "batch_req_'

ANOTHER = "name another file with -o"

Response = dict[str, Any]


class EarlierAnswers(NamedTuple):
    """Digests of the answers in an output (see `BatchLine.digest`; None: it has none), by the names of their lines."""

    digests: dict[Name, str | None]
    needs_rewrite: bool
    """Whether it also holds refusals, answers that later ones take the place of, or a torn last line."""


class Comparison(NamedTuple):
    """Lines of an input beside the answers of an output."""

    stale: frozenset[Name]
    """Names of lines whose answers are of another request, of another model or of other settings."""
    undigested_count: int
    """Answers that have no digest, and are kept."""
    unanswered_count: int
    """Lines that have no answer."""


def earlier_answers(output: Path | None) -> EarlierAnswers:
    """Read an output that is a file; devices have no end. Raises RequestError for a file that is no such output."""
    lines, needs_rewrite = _lines(output) if output and output.is_file() else ({}, False)
    return EarlierAnswers({name: json.loads(line).get("digest") for name, line in lines.items()}, needs_rewrite)


def compare(earlier: EarlierAnswers, source: BinaryIO, model: str) -> Comparison:
    """Compare the lines of an input with the answers of an output. model: see `Answers`."""
    stale = set[Name]()
    undigested_count = 0
    unanswered_count = 0
    for line in batch_lines(source):
        if line.name not in earlier.digests:
            unanswered_count += 1
        elif line.error is None:
            digest = earlier.digests[line.name]
            undigested_count += digest is None
            if digest not in (None, line.digest(model)):
                stale.add(line.name)
    return Comparison(frozenset(stale), undigested_count, unanswered_count)


def _lines(output: Path) -> tuple[dict[Name, bytes], bool]:
    """Return the lines of an output that answer, by the names of what they answer, and whether it holds more.

    Of several answers to one line the last one counts, in the place of the first. Raises RequestError.
    """
    answers: dict[Name, bytes | None] = {}
    count = 0
    torn = b""
    try:
        with output.open("rb") as file:
            while line := read_line(file, str(output), ANOTHER):
                if not line.endswith(b"\n"):
                    torn = line
                    break
                count += 1
                name, is_answer = _answer(line)
                answers[name] = line if is_answer else None
    except OSError as error:
        raise _unwritable(output, error) from error
    except (ValueError, TypeError, KeyError, RecursionError):
        torn = b"not ours"
    if not torn.startswith(_BEGINNING[: len(torn)]):
        raise RequestError(f"{output} holds something else than answers of a batch; {ANOTHER}")
    lines = {name: line for name, line in answers.items() if line}
    return lines, bool(torn) or len(lines) < count


def _unwritable(output: Path, error: OSError) -> RequestError:
    advice = f"make room or {ANOTHER}, and run the command again: what is answered stays"
    return RequestError(f"{output} cannot be written ({error.strerror}); {advice}")


def _answer(line: bytes) -> tuple[Name, bool]:
    """Return the name of the line that an output's line is of, and whether it answers that, and is no refusal."""
    answer = json.loads(line)
    name: Name = answer["custom_id"] or answer["error"]["line"]
    return name, bool(answer["response"] and _succeeded(answer["response"]))


def _succeeded(response: Response) -> bool:
    return bool(response["status_code"] == 200)


class Answers(AbstractContextManager["Answers"]):
    """An output: what it has not answered is asked, and each answer is added to it at once, while it is entered."""

    def __init__(
        self,
        path: Path | None,
        model: str,
        on_line: Callable[[], object],
        earlier: EarlierAnswers | None = None,
        stale: frozenset[Name] = frozenset(),
    ) -> None:
        """Write to a file, or to stdout for None. Nothing is written before it is entered.

        model: identity of all that changes texts beside a request. on_line: called once for each line of the input.
        earlier: the answers that the file has. stale: names of those among them that are answered anew.
        """
        self.tally = Tally()
        self._path = path
        self._model = model
        self._on_line = on_line
        self._earlier = earlier or EarlierAnswers({}, False)
        self._stale = stale
        self._file: TextIO = sys.stdout

    def __enter__(self) -> Answers:
        """Open the file, and drop refusals and a torn last line from it. Raises RequestError."""
        if self._path:
            try:
                if self._earlier.needs_rewrite:
                    _rewrite(self._path)
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                raise _unwritable(self._path, error) from error
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file. New answers in place of earlier ones move to the places of these."""
        if self._path:
            with suppress(OSError):  # each answer was written at once, or that has failed
                self._file.close()
                if self._stale:
                    _rewrite(self._path)

    def missing(self, source: BinaryIO) -> Iterator[BatchLine]:
        """Yield the lines that have no answer yet, or a stale one, and count the others."""
        for line in batch_lines(source):
            if line.name not in self._earlier.digests or line.name in self._stale:
                yield line
            else:
                self.tally.skipped += 1
                self._on_line()

    def add(self, line: BatchLine, response: Response | None = None) -> None:
        """Write the answer to a line; `response` is None for a line that is itself in error. Raises RequestError."""
        named = isinstance(line.name, str)
        error = None
        if line.error is not None:
            error = {"code": line.code, "message": line.error} | ({} if named else {"line": line.name})
        head = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.name if named else None}
        answer = head | {"response": response, "error": error, "digest": line.digest(self._model)}
        try:
            self._file.write(json.dumps(answer, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as failure:
            if self._path is None:
                raise
            raise _unwritable(self._path, failure) from failure
        if response is None:
            self.tally.refuse(str(line.error))
        elif not _succeeded(response):
            self.tally.refuse(str(response["body"]["error"]["message"]), str(line.name))
        else:
            self.tally.answered += 1
        self._on_line()


def _rewrite(path: Path) -> None:
    """Leave the answers in a file, each once, and nothing else. Raises OSError."""
    lines, _ = _lines(path)
    with whole_file(path) as partial:
        partial.write_bytes(b"".join(lines.values()))


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
    start, *body_messages = sent
    text = b"".join(message.get("body", b"") for message in body_messages)
    request_id = dict(start["headers"])[b"x-request-id"].decode()
    return {"status_code": start["status"], "request_id": request_id, "body": json.loads(text)}
