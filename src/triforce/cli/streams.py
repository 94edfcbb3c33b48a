"""The streams of a command. What cannot be written to stdout is an error; what cannot be written to stderr is not."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from typing import Any

from triforce.errors import TriforceError


class OutputError(TriforceError):
    """Output of a command that cannot be delivered."""


def prepare() -> None:
    """Put streams of UTF-8 in the places of stdout and stderr, and nothing to read in that of a closed stdin.

    Models write any character, and a locale without it must not end the text with an error. Streams that a program has
    set up, such as a notebook's or a test's, stay, in UTF-8 where they can.
    """
    closed = [_fill(descriptor) for descriptor in range(3)]
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  it stays open as long as the process
    for name, kind in (("stdout", _Output), ("stderr", _Messages)):
        stream = getattr(sys, name)
        own = getattr(sys, f"__{name}__")
        if stream is own:
            setattr(sys, name, _text_stream(kind(("stdin", "stdout", "stderr").index(name), closed), own))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def require_stdout() -> None:
    """Raise OutputError where stdout was closed before the command began: before a model is loaded for nothing."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output) and raw.shut:
        raise _lost("it is closed")


def stdin_has_data() -> bool:
    """Whether stdin is a pipe or a file, and has something to read. Nothing is read or waited for."""
    try:
        descriptor = sys.stdin.fileno()
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode):
            return facts.st_size > os.lseek(descriptor, 0, os.SEEK_CUR)
    except (OSError, ValueError):  # a stream of Python's own, or one that is closed
        return False
    look = select.poll()
    look.register(descriptor, select.POLLIN)
    return stat.S_ISFIFO(facts.st_mode) and any(event & select.POLLIN for _, event in look.poll(0))


class _Output(io.FileIO):
    """Standard output. The first write that fails raises OutputError, or BrokenPipeError; later ones are dropped."""

    def __init__(self, descriptor: int, closed: list[bool]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.shut = closed[descriptor]
        self._failed = False

    def write(self, data: Any) -> int:
        if self._failed:  # the interpreter writes what is left once more when it ends
            return len(data)
        try:
            if self.shut:
                raise _lost("it is closed")
            return super().write(data) or 0
        except BrokenPipeError:
            self._failed = True
            raise
        except (OSError, OutputError) as error:
            self._failed = True
            raise error if isinstance(error, OutputError) else _lost(error.strerror or str(error)) from error


class _Messages(io.FileIO):
    """Standard error: what cannot be written is dropped, and the text and the exit code are what they are."""

    def __init__(self, descriptor: int, closed: list[bool]) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _lost(why: str) -> OutputError:
    return OutputError(f"stdout cannot be written ({why}); send it where there is room for the text")


def _fill(descriptor: int) -> bool:
    """Whether a descriptor was closed: no file that is opened later, a model's say, may take its place."""
    try:
        os.fstat(descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        return True
    return False


def _text_stream(raw: io.FileIO, like: Any) -> io.TextIOWrapper:
    """Return a stream of text to a file, with the buffering of another one."""
    lines = raw.isatty() if like is None else like.line_buffering
    through = like is not None and like.write_through
    how: dict[str, Any] = {"line_buffering": lines, "write_through": through}
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", **how)
