"""Bytes of files that users name: no more than a text has, read in pieces, so that Ctrl-C is heard between them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from triforce.errors import RequestError

MOST_BYTES = 1 << 28
"""Of a text: no model has a context for as much."""
PIECE = 1 << 20
"""Bytes that are read at once."""


def read_file(file: str | Path, advice: str = "give a text file", pipes: bool = True) -> bytes:
    """Return what a file holds. pipes: whether pipes and terminals are read, too; other devices may have no end.

    Raises RequestError for what cannot be read, is no such file, or is larger than MOST_BYTES.
    """
    try:
        with open_file(file, advice, pipes) as opened:
            return read_all(opened, str(file), advice)
    except OSError as error:
        raise unreadable(file, error, advice) from error


def open_file(file: str | Path, advice: str = "give a text file", pipes: bool = True) -> BinaryIO:
    """Open a file as `read_file` reads it. Raises RequestError for what is no such file or too large, and OSError."""
    facts = os.stat(file)
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode) or (pipes and _ends(file, facts.st_mode))):
        raise RequestError(f"{file} is no regular file; {advice}")
    return open(file, "rb")


def read_all(opened: BinaryIO, source: str, advice: str = "give less") -> bytes:
    """Read the rest of a file. Raises RequestError if it is larger than MOST_BYTES."""
    rest = bytearray()
    if _size(opened) > MOST_BYTES:  # a file with holes has any size
        raise _too_large(source, advice)
    while piece := opened.read(PIECE):
        rest += piece
        if len(rest) > MOST_BYTES:
            raise _too_large(source, advice)
        if len(piece) < PIECE:  # the end: a terminal would be asked for another one
            break
    return bytes(rest)


def read_line(opened: BinaryIO, source: str, advice: str = "give shorter lines") -> bytes:
    """Read a line; nothing at the end. Raises RequestError if it is larger than MOST_BYTES."""
    line = opened.readline(MOST_BYTES + 1)
    if len(line) > MOST_BYTES:
        raise _too_large(f"a line of {source}", advice)
    return line


def _too_large(source: str, advice: str) -> RequestError:
    return RequestError(f"{source} is larger than {MOST_BYTES >> 20:,} MiB, which no model's context holds; {advice}")


def unreadable(file: str | Path, error: OSError, advice: str = "give a text file") -> RequestError:
    """Return the error of a file that cannot be read."""
    return RequestError(f"{file} cannot be read ({error.strerror}); {advice}")


def _ends(file: str | Path, mode: int) -> bool:
    """Whether what is no regular file is one that a program or a person writes to, and ends."""
    if stat.S_ISCHR(mode):
        with open(file, "rb", buffering=0) as opened:
            return opened.isatty()
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _size(opened: BinaryIO) -> int:
    """Return the bytes of a regular file; 0 of anything else."""
    try:
        return os.fstat(opened.fileno()).st_size
    except OSError:  # a stream of Python's own, which has no file
        return 0
