"""Texts from files and stdin, and files that figures go to."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from triforce.cli.argument_values import STANDARD
from triforce.disk_cache.manifest import text_of
from triforce.errors import RequestError
from triforce.text_encoding import NotTextError, decode, kind, marked
from triforce.user_files import open_file, read_all, read_file, read_line, unreadable

REQUESTS = "give a JSONL file of requests"


def read_text(file: str) -> str:
    """The text in a file, or on stdin for "-", in UTF-8 or as its mark says. Raises RequestError."""
    if file == STANDARD:
        return decode_text(read_all(sys.stdin.buffer, "stdin"), "stdin")
    return decode_text(read_file(file), file)


def read_document(file: str, options: Namespace) -> str:
    """The text in a file, on stdin for "-", or of a folder as it was read into the disk cache. Raises RequestError."""
    if file == STANDARD or not Path(file).is_dir():
        return read_text(file)
    cache = getattr(options, "disk_cache", None)
    return text_of(Path(file), Path(cache) if cache else None, getattr(options, "disk_cache_network", False))


def read_texts(paths: Sequence[str]) -> dict[str, str]:
    """Texts by file name, of files and of those in folders. Raises RequestError."""
    files = [file for path in paths for file in _files(Path(path))]
    texts = {file.name: read_text(str(file)) for file in files}
    if len(texts) < len({*files}):
        raise RequestError("two texts have one name, by which they are told apart; rename one of them")
    if not texts:
        raise RequestError(f"there is no file in {', '.join(paths)}; give --texts some UTF-8 texts")
    if not any(texts.values()):
        raise RequestError(f"{', '.join(texts)}: nothing is in there; give --texts some UTF-8 texts")
    return texts


def _files(path: Path) -> list[Path]:
    """The files of a folder, not of those in it; or a file itself."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))


def stdin_lines() -> Iterator[bytes]:
    """Yield the lines of stdin as they come; text with a byte order mark is read whole. Raises RequestError."""
    first = read_line(sys.stdin.buffer, "stdin")
    yield from _lines(first, sys.stdin.buffer, "stdin")


def open_lines(file: str) -> BinaryIO:
    """Return the lines of a file, or of stdin for "-", in UTF-8 and from their beginning. Raises RequestError."""
    if file == STANDARD:
        return io.BytesIO(decode_text(read_all(sys.stdin.buffer, "stdin", "name a file instead"), "stdin").encode())
    try:
        with ExitStack() as closing:
            opened = closing.enter_context(open_file(file, REQUESTS))
            first = read_line(opened, file)
            if known := kind(first):
                raise RequestError(f"{file} {known}")
            if marked(first) or not opened.seekable():
                return io.BytesIO(b"".join(_lines(first, opened, file)))
            opened.seek(0)
            closing.pop_all()
            return opened
    except OSError as error:
        raise unreadable(file, error, REQUESTS) from error


def count_lines(opened: BinaryIO, source: str) -> int:
    """Return how many of the lines that follow say something. Raises RequestError for one that is too large."""
    return sum(bool(line.strip()) for line in iter(lambda: read_line(opened, source), b""))


def _lines(first: bytes, rest: BinaryIO, source: str) -> Iterator[bytes]:
    """Yield lines of UTF-8 text, of which the first was read. Raises RequestError."""
    if marked(first):
        yield from decode_text(first + read_all(rest, source), source).encode().splitlines(keepends=True)
        return
    while first:
        yield first
        first = read_line(rest, source)


def decode_text(data: bytes, source: str) -> str:
    """Bytes as text. Raises RequestError saying what `source` is instead."""
    try:
        return decode(data)
    except NotTextError as error:
        raise RequestError(f"{source} {error}") from error


def require_writable(file: str | None) -> None:
    """Raise RequestError if figures cannot be written to `file`: before the minutes of measuring, not after them."""
    path = Path(file).absolute() if file else None
    if path and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise RequestError(f"{file} cannot be written; name a file in a folder that exists")


def write_text(file: str, text: str) -> None:
    """Write a text to a file. Raises RequestError."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(file, error) from error


def unwritable(file: str, error: OSError) -> RequestError:
    """Return the error of a file that cannot be written."""
    return RequestError(
        f"{file} cannot be written ({error.strerror}); name a file on a disk with room, in a folder of yours"
    )
