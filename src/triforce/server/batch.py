"""Requests from a file in OpenAI's batch format, passed to the application as ASGI requests.

Each line of the input has one line in the output, in the order of completion. An interrupted run can be resumed: lines
with an answer are skipped, and refused lines are retried, as they may have been corrected.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
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

LineName = str | int
"""Name of a line: its custom_id, or its line number without one."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input: a request, or its error."""

    name: LineName
    url: str = ""
    body: bytes = b""
    error: str | None = None
    code: str = "invalid_line"

    def digest(self, identity: str) -> str | None:
        """Return a hex digest of the request and of `identity` (see `Answers`); None for an invalid line."""
        request = "\n".join([identity, self.url, ""]).encode() + self.body
        return None if self.error is not None else blake2b(request, digest_size=16).hexdigest()


def batch_lines(file: BinaryIO) -> Iterator[BatchLine]:
    """Yield the non-blank lines of an input. A repeated custom_id makes the later line invalid."""
    numbers: dict[LineName, int] = {}
    for number, text in enumerate(file, 1):
        if text.strip():
            line = _parse_line(number, text)
            if line.name in numbers:
                error = f"custom_id {line.name!r} is already that of line {numbers[line.name]}; give each line its own"
                line = BatchLine(number, error=error)
            numbers[line.name] = number
            yield line


def _parse_line(number: int, text: bytes) -> BatchLine:
    try:
        request = json.loads(decode(text.rstrip()))
    except NotTextError as error:
        return BatchLine(number, error=f"line {number} {error}")
    except (ValueError, RecursionError) as error:
        return BatchLine(number, error=f"line {number} is not JSON: {_json_reason(error)}")
    name = request.get("custom_id") if isinstance(request, dict) else None
    if not isinstance(name, str) or not name:
        return BatchLine(number, error=f"line {number} must be a JSON object whose custom_id is a text")
    body = request.get("body")
    url = request.get("url")
    if request.get("method") != "POST" or url not in PATHS:
        return BatchLine(name, error=f"line {number}: method must be POST, and url one of {', '.join(PATHS)}")
    if not isinstance(body, dict) or body.get("stream"):
        return BatchLine(name, error=f"line {number}: body must be a JSON object, without stream")
    return BatchLine(name, url, json.dumps(body).encode())


def _json_reason(error: Exception) -> str:
    """Return why a line is not JSON, without the parser's line number, which is always 1."""
    return f"{error.msg}, at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


_VALUE = re.compile(r"""'[^']*'|"[^"]*"|0x[0-9a-f]+|-?\d[\d.,]*""")
"""Variable parts of a reason: quoted names, and numbers such as those of lines and bytes."""


@dataclass(slots=True)
class Tally:
    """Counts of lines by outcome."""

    answered: int = 0
    skipped: int = 0
    _refused: Counter[str] = field(default_factory=Counter)
    """Number of refused lines by kind of reason."""
    _first_reasons: dict[str, str] = field(default_factory=dict)
    """First reason of each kind."""

    @property
    def refused(self) -> int:
        return self._refused.total()

    def refuse(self, reason: str, name: str = "") -> None:
        """Count a refused line. name: of the line, where the reason does not name it."""
        kind = _VALUE.sub("", reason)
        self._refused[kind] += 1
        self._first_reasons.setdefault(kind, f"{name}: {reason}" if name else reason)

    def commonest(self) -> str:
        """Return a sentence with the number of lines of the commonest kind of reason, and its first reason."""
        (kind, line_count), *other_kinds = self._refused.most_common(2)
        if self.refused == 1:
            return f"The reason: {self._first_reasons[kind]}"
        which = "the commonest" if other_kinds else "one"
        lines = f"{line_count:,} line{'s were' if line_count > 1 else ' was'} refused for {which} reason"
        return f"{lines}; the first of them: {self._first_reasons[kind]}"


_ANSWER_PREFIX = b'{"id": "batch_req_'

OUTPUT_ADVICE = "name another file with -o"

Response = dict[str, Any]


class EarlierAnswers(NamedTuple):
    """Answers that an output already holds."""

    digests: dict[LineName, str | None]
    """Digest of each answer (see `BatchLine.digest`), or None without one, by the name of its line."""
    needs_rewrite: bool
    """Whether the output also holds refusals, superseded answers, or a truncated last line."""


class Comparison(NamedTuple):
    """Comparison of the lines of an input with the answers of an output."""

    stale: frozenset[LineName]
    """Names of lines whose answers belong to another request, another model or other settings."""
    undigested_count: int
    """Number of answers without a digest, which stay valid."""
    unanswered_count: int
    """Number of lines without an answer."""


def earlier_answers(output: Path | None) -> EarlierAnswers:
    """Read the answers of an output. Only regular files are read, as devices have no end.

    Raises RequestError for a file that is no output of a batch.
    """
    lines, needs_rewrite = _answer_lines(output) if output and output.is_file() else ({}, False)
    return EarlierAnswers({name: json.loads(line).get("digest") for name, line in lines.items()}, needs_rewrite)


def compare(earlier: EarlierAnswers, source: BinaryIO, identity: str) -> Comparison:
    """Compare the lines of an input with the answers of an output. identity: see `Answers`."""
    stale = set[LineName]()
    undigested_count = 0
    unanswered_count = 0
    for line in batch_lines(source):
        if line.name not in earlier.digests:
            unanswered_count += 1
        elif line.error is None:
            digest = earlier.digests[line.name]
            undigested_count += digest is None
            if digest not in (None, line.digest(identity)):
                stale.add(line.name)
    return Comparison(frozenset(stale), undigested_count, unanswered_count)


def _answer_lines(output: Path, with_refusals: bool = False) -> tuple[dict[LineName, bytes], bool]:
    """Return the answers of an output by the name of the input line, and whether the output holds other lines.

    Of several answers to one line the last one is returned, at the position of the first. with_refusals: whether
    refusals count as answers. Raises RequestError.
    """
    answers: dict[LineName, bytes | None] = {}
    count = 0
    truncated_line = b""
    is_batch_output = True
    try:
        with output.open("rb") as file:
            while line := read_line(file, str(output), OUTPUT_ADVICE):
                if not line.endswith(b"\n"):
                    truncated_line = line
                    break
                count += 1
                name, is_answer = _parse_answer(line)
                answers[name] = line if is_answer or with_refusals else None
    except OSError as error:
        raise _unwritable(output, error) from error
    except (ValueError, TypeError, KeyError, RecursionError):
        is_batch_output = False
    if not (is_batch_output and truncated_line.startswith(_ANSWER_PREFIX[: len(truncated_line)])):
        raise RequestError(f"{output} holds lines that are not answers of a batch; {OUTPUT_ADVICE}")
    lines = {name: line for name, line in answers.items() if line}
    return lines, bool(truncated_line) or len(lines) < count


@contextmanager
def sole_writer(output: Path | None) -> Iterator[None]:
    """Lock an output against other batches. Raises RequestError while another batch writes it.

    The lock is a file beside the output, as the output itself is replaced. Where it cannot be created, nothing is
    locked.
    """
    if output is None or (output.exists() and not output.is_file()):
        yield
        return
    real_path = Path(os.path.realpath(output))
    lock = real_path.with_name(f"{real_path.name}.lock")
    descriptor = None
    try:
        descriptor = _locked(lock)
    except BlockingIOError as error:
        raise RequestError(
            f"{output} is being written by another triforce batch; wait for it, or {OUTPUT_ADVICE}"
        ) from error
    except OSError:  # the folder accepts no new files
        pass
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                lock.unlink()
            os.close(descriptor)


def _locked(lock: Path) -> int:
    """Create and lock a file, if its file system has locks, and return its descriptor.

    Raises BlockingIOError while another process holds the lock, which ends with that process, and other OSErrors.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            return descriptor
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its last holder has removed the file meanwhile


def _unwritable(output: Path, error: OSError) -> RequestError:
    advice = f"make room or {OUTPUT_ADVICE}, and run the command again: earlier answers are kept"
    return RequestError(f"{output} cannot be written ({error.strerror}); {advice}")


def _parse_answer(line: bytes) -> tuple[LineName, bool]:
    """Return the name of the input line of an output line, and whether the output line is a successful answer."""
    answer = json.loads(line)
    name: LineName = answer["custom_id"] or answer["error"]["line"]
    return name, bool(answer["response"] and _succeeded(answer["response"]))


def _succeeded(response: Response) -> bool:
    return bool(response["status_code"] == 200)


class Answers(AbstractContextManager["Answers"]):
    """An output. As a context manager it opens the file; each answer is written at once."""

    def __init__(
        self,
        path: Path | None,
        identity: str,
        on_line: Callable[[], object],
        earlier: EarlierAnswers | None = None,
        stale: frozenset[LineName] = frozenset(),
    ) -> None:
        """Write to the file `path`, or to stdout for None. Nothing is written before `__enter__`.

        identity: a text that names the model and each setting on which answers depend. on_line: called once for each
        line of the input. earlier: the answers of the file. stale: names of the earlier answers to replace.
        """
        self.tally = Tally()
        self._path = path
        self._identity = identity
        self._on_line = on_line
        self._earlier = earlier or EarlierAnswers({}, False)
        self._stale = stale
        self._file: TextIO = sys.stdout

    def __enter__(self) -> Answers:
        """Open the file, and remove refusals and a truncated last line from it. Raises RequestError."""
        if self._path:
            try:
                if self._earlier.needs_rewrite:
                    _rewrite(self._path)
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                raise _unwritable(self._path, error) from error
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file. An answer or refusal that replaces an earlier answer moves to its position."""
        if self._path:
            with suppress(OSError):  # each answer is flushed already, or its error was raised
                self._file.close()
                if self._stale:
                    _rewrite(self._path, with_refusals=True)

    def missing(self, source: BinaryIO) -> Iterator[BatchLine]:
        """Yield the lines without an answer or with a stale one, and count the others as skipped."""
        for line in batch_lines(source):
            if line.name not in self._earlier.digests or line.name in self._stale:
                yield line
            else:
                self.tally.skipped += 1
                self._on_line()

    def add(self, line: BatchLine, response: Response | None = None) -> None:
        """Write the answer to a line; `response` is None for an invalid line. Raises RequestError."""
        has_custom_id = isinstance(line.name, str)
        error = None
        if line.error is not None:
            error = {"code": line.code, "message": line.error} | ({} if has_custom_id else {"line": line.name})
        head = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.name if has_custom_id else None}
        answer = head | {"response": response, "error": error, "digest": line.digest(self._identity)}
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


def _rewrite(path: Path, with_refusals: bool = False) -> None:
    """Rewrite an output with exactly one line for each answer. with_refusals: refusals stay, too. Raises OSError."""
    lines, _ = _answer_lines(path, with_refusals)
    with whole_file(path) as partial:
        partial.write_bytes(b"".join(lines.values()))


IN_FLIGHT = 32
"""Requests in flight at a time; the engine queues those beyond its rows."""
LIMITS = Limits(seconds=float("inf"), waiting=IN_FLIGHT * Limits().prompts, max_itl=2.0)
"""Limits of a batch: no timeout, and a queue that never overflows."""


async def run(app: ASGIApp, source: BinaryIO, answers: Answers) -> None:
    """Answer the lines of `source` that `answers.missing` yields."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def work(line: BatchLine) -> None:
        try:
            response = None if line.error is not None else await post(app, line.url, line.body)
        finally:
            slots.release()
        answers.add(line, response)

    try:
        async with asyncio.TaskGroup() as group:
            for line in answers.missing(source):
                await slots.acquire()
                group.create_task(work(line))
    except ExceptionGroup as errors:  # a full disk, say
        raise errors.exceptions[0] from None


async def post(app: ASGIApp, path: str, body: bytes) -> Response:
    """Return the application's answer to a POST in the format of the output file."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the client never disconnects
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
