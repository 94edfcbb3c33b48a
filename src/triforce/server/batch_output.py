"""The output of a batch: a file that can be taken up, or stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO
from uuid import uuid4

from triforce.errors import RequestError
from triforce.server.batch_lines import BatchLine, Name, batch_lines
from triforce.server.batch_tally import Tally
from triforce.user_files import read_line
from triforce.whole_file import whole_file

_BEGINNING = b'{"id": "batch_req_'

ANOTHER = "name another file with -o"

Response = dict[str, Any]


class EarlierAnswer(NamedTuple):
    """A line of an output that answers a line of the input. digest: see `BatchLine.digest`; None: it has none."""

    line: bytes
    digest: str | None


class EarlierAnswers(NamedTuple):
    """Contents of an output: the answers by the names of their lines, and whether it holds more."""

    answers: dict[Name, EarlierAnswer]
    more: bool
    """Refusals, answers that later ones take the place of, or a torn last line."""


def earlier_answers(output: Path) -> EarlierAnswers:
    """Read an output that is a file; devices have no end. Raises RequestError for a file that is no such output.

    Of several answers to one line the last one counts, in the place of the first.
    """
    if not output.is_file():
        return EarlierAnswers({}, False)
    named: dict[Name, EarlierAnswer | None] = {}
    lines, torn = 0, b""
    try:
        with output.open("rb") as file:
            while line := read_line(file, str(output), ANOTHER):
                if not line.endswith(b"\n"):
                    torn = line
                    break
                lines += 1
                name, answer = _answer(line.rstrip())
                named[name] = answer
    except OSError as error:
        raise _unwritable(output, error) from error
    except (ValueError, TypeError, KeyError, RecursionError):
        torn = b"not ours"
    if not torn.startswith(_BEGINNING[: len(torn)]):
        raise RequestError(f"{output} holds something else than answers of a batch; {ANOTHER}")
    answers = {name: answer for name, answer in named.items() if answer}
    return EarlierAnswers(answers, bool(torn) or len(answers) < lines)


def _unwritable(output: Path, error: OSError) -> RequestError:
    advice = f"make room or {ANOTHER}, and run the command again: what is answered stays"
    return RequestError(f"{output} cannot be written ({error.strerror}); {advice}")


def _answer(line: bytes) -> tuple[Name, EarlierAnswer | None]:
    """Return the name of the line that an answer is of, and the answer; None for a refusal."""
    answer = json.loads(line)
    name: Name = answer["custom_id"] or answer["error"]["line"]
    is_good = answer["response"] and _good(answer["response"])
    return name, EarlierAnswer(line, answer.get("digest")) if is_good else None


def _good(response: Response) -> bool:
    return bool(response["status_code"] == 200)


class Answers(AbstractContextManager["Answers"]):
    """An output: what it has not answered is asked, and each answer is added to it at once, while it is entered."""

    def __init__(self, path: Path | None, model: str, on_line: Callable[[], object]) -> None:
        """Read a file, or take stdout for None. `on_line` is called once for each line of the input.

        model: identity of all that changes texts beside a request. Raises RequestError as `earlier_answers` does.
        Nothing is written before it is entered.
        """
        self.tally = Tally()
        self._path, self._model, self._on_line = path, model, on_line
        self._earlier = earlier_answers(path) if path else EarlierAnswers({}, False)
        self._stale: set[Name] = set()
        self._file: TextIO = sys.stdout

    def compare(self, source: BinaryIO, again: bool) -> int:
        """Compare the answers with the lines of the input; return how many answers have no digest, and are kept.

        again: those that are of other requests, or of another model, are answered anew. Else raises RequestError.
        """
        undigested = 0
        for line in batch_lines(source) if self._earlier.answers else ():
            if (answer := self._earlier.answers.get(line.name)) and line.error is None:
                undigested += answer.digest is None
                if answer.digest not in (None, line.digest(self._model)):
                    self._stale.add(line.name)
        if self._stale and not again:
            count = f"{len(self._stale)} of the {len(self._earlier.answers)} answers in {self._path}"
            raise RequestError(f"{count} are of other requests, of another model or of other settings; answer them "
                               "anew with --again, or name another file with -o")  # fmt: skip
        return undigested

    def __enter__(self) -> Answers:
        """Open the file, and drop refusals and a torn last line from it. Raises RequestError."""
        if self._path:
            try:
                if self._earlier.more:
                    _write(self._path, self._earlier)
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
                    _write(self._path, earlier_answers(self._path))

    def missing(self, source: BinaryIO) -> Iterator[BatchLine]:
        """Yield the lines that have no answer yet, or a stale one, and count the others."""
        for line in batch_lines(source):
            if line.name not in self._earlier.answers or line.name in self._stale:
                yield line
            else:
                self.tally.skipped += 1
                self._on_line()

    def add(self, line: BatchLine, response: Response | None = None) -> None:
        """Write the answer to a line; `response` is None for a line that is itself in error. Raises RequestError."""
        named, error = isinstance(line.name, str), None
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
        elif not _good(response):
            self.tally.refuse(str(response["body"]["error"]["message"]), str(line.name))
        else:
            self.tally.answered += 1
        self._on_line()


def _write(path: Path, contents: EarlierAnswers) -> None:
    """Replace a file by its answers. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_bytes(b"".join(answer.line + b"\n" for answer in contents.answers.values()))
