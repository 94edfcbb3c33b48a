"""The output of a batch: a file that can be taken up, or stdout."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO
from uuid import uuid4

from triforce.errors import RequestError
from triforce.server.batch_lines import BatchLine, Name, batch_lines
from triforce.whole_file import whole_file

_BEGINNING = b'{"id": "batch_req_'

Response = dict[str, Any]


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


class EarlierAnswers(NamedTuple):
    """Contents of an output: the names of the lines that it has answered, the answers, and whether it holds more."""

    names: set[Name]
    lines: list[bytes]
    more: bool
    """Refusals, or a torn last line."""


def earlier_answers(output: Path) -> EarlierAnswers:
    """Read an output that is a file; devices have no end. Raises RequestError for a file that is no such output."""
    if not output.is_file():
        return EarlierAnswers(set(), [], False)
    try:
        content = output.read_bytes()
    except OSError as error:
        raise _unwritable(output, error) from error
    complete, _, torn = content.rpartition(b"\n")
    try:
        lines = {line: _answered(json.loads(line)) for line in complete.splitlines()}
    except (ValueError, TypeError, KeyError, RecursionError):
        lines, torn = {}, b"not ours"
    if not torn.startswith(_BEGINNING[: len(torn)]):
        raise RequestError(f"{output} holds something else than answers of a batch; name another file with -o")
    kept = [line for line, name in lines.items() if name is not None]
    names = {name for name in lines.values() if name is not None}
    return EarlierAnswers(names, kept, bool(torn) or len(kept) < len(lines))


def _unwritable(output: Path, error: OSError) -> RequestError:
    advice = "make room or name another file with -o, and run the command again: what is answered stays"
    return RequestError(f"{output} cannot be written ({error.strerror}); {advice}")


def _answered(answer: Any) -> Name | None:
    """Return the name of the line that this answers; None for a refusal."""
    name: Name = answer["custom_id"] or answer["error"]["line"]
    return name if answer["response"] and _good(answer["response"]) else None


def _good(response: Response) -> bool:
    return bool(response["status_code"] == 200)


class Answers(AbstractContextManager["Answers"]):
    """An output: what it has not answered is asked, and each answer is added to it at once, while it is entered."""

    def __init__(self, path: Path | None, on_line: Callable[[], object]) -> None:
        """Read a file, or take stdout for None. `on_line` is called once for each line of the input.

        Raises RequestError as `earlier_answers` does. Nothing is written before it is entered.
        """
        self.tally = Tally()
        self._path, self._on_line = path, on_line
        self._earlier = earlier_answers(path) if path else EarlierAnswers(set(), [], False)
        self._file: TextIO = sys.stdout

    def __enter__(self) -> Answers:
        """Open the file, and drop refusals and a torn last line from it. Raises RequestError."""
        if self._path:
            try:
                if self._earlier.more:
                    with whole_file(self._path) as partial:
                        partial.write_bytes(b"".join(line + b"\n" for line in self._earlier.lines))
                self._file = self._path.open("a", encoding="utf-8")
            except OSError as error:
                raise _unwritable(self._path, error) from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._path:
            with suppress(OSError):  # each answer was written at once, or that has failed
                self._file.close()

    def missing(self, source: BinaryIO) -> Iterator[BatchLine]:
        """Yield the lines that have no answer yet, and count the others."""
        for line in batch_lines(source):
            if line.name not in self._earlier.names:
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
        answer = head | {"response": response, "error": error}
        try:
            self._file.write(json.dumps(answer, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as failure:
            if self._path is None:
                raise
            raise _unwritable(self._path, failure) from failure
        if response is None or not _good(response):
            self.tally.reasons[str(response["body"]["error"]["message"] if response else line.error)] += 1
        else:
            self.tally.answered += 1
        self._on_line()
