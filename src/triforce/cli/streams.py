"""Standard streams of a command. A failed write to stdout is an error; a failed write to stderr is not."""

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
    """Replace stdout and stderr by UTF-8 streams, and a closed stdin by an empty one.

    Models write any character, and a locale without it must not end the text with an error. Streams that a program has
    set up, such as a notebook's or a test's, stay; they are switched to UTF-8 where possible.
    """
    closed_descriptors = [_reserve_descriptor(descriptor) for descriptor in range(3)]
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  it stays open as long as the process
    for name, stream_class in (("stdout", _Output), ("stderr", _Messages)):
        stream = getattr(sys, name)
        default_stream = getattr(sys, f"__{name}__")
        if stream is default_stream:
            setattr(
                sys,
                name,
                _text_stream(
                    stream_class(("stdin", "stdout", "stderr").index(name), closed_descriptors), default_stream
                ),
            )
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def require_stdout() -> None:
    """Raise OutputError if stdout was closed before the command began, so that no model is loaded in vain."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output) and raw.was_closed:
        raise _write_error("it is closed")


def stdin_has_data() -> bool:
    """Whether stdin is a pipe or a file with data to read. The call neither reads nor waits."""
    try:
        descriptor = sys.stdin.fileno()
        file_status = os.fstat(descriptor)
        if stat.S_ISREG(file_status.st_mode):
            return file_status.st_size > os.lseek(descriptor, 0, os.SEEK_CUR)
    except (OSError, ValueError):  # a stream without a descriptor, or a closed one
        return False
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return stat.S_ISFIFO(file_status.st_mode) and any(event & select.POLLIN for _, event in poller.poll(0))


class _Output(io.FileIO):
    """Standard output. The first write that fails raises OutputError, or BrokenPipeError; later ones are dropped."""

    def __init__(self, descriptor: int, closed_descriptors: list[bool]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.was_closed = closed_descriptors[descriptor]
        self._failed = False

    def write(self, data: Any) -> int:
        if self._failed:  # the interpreter writes the remaining bytes once more when it ends
            return len(data)
        try:
            if self.was_closed:
                raise _write_error("it is closed")
            return super().write(data) or 0
        except BrokenPipeError:
            self._failed = True
            raise
        except (OSError, OutputError) as error:
            self._failed = True
            raise error if isinstance(error, OutputError) else _write_error(error.strerror or str(error)) from error


class _Messages(io.FileIO):
    """Standard error. A failed write is dropped; the text on stdout and the exit code do not change."""

    def __init__(self, descriptor: int, closed_descriptors: list[bool]) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _write_error(reason: str) -> OutputError:
    return OutputError(f"stdout cannot be written ({reason}); send it where there is room for the text")


def _reserve_descriptor(descriptor: int) -> bool:
    """Whether a descriptor was closed. If so, open os.devnull on it, so that no later file (a model's, say) gets it."""
    try:
        os.fstat(descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        return True
    return False


def _text_stream(raw: io.FileIO, reference_stream: Any) -> io.TextIOWrapper:
    """Return a text stream to a file, buffered as `reference_stream` is; without one, by lines on a terminal."""
    line_buffering = raw.isatty() if reference_stream is None else reference_stream.line_buffering
    write_through = reference_stream is not None and reference_stream.write_through
    buffering: dict[str, Any] = {"line_buffering": line_buffering, "write_through": write_through}
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", **buffering)
