"""Texts from files and stdin, and files that figures go to."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from triforce.cli.options import STANDARD
from triforce.disk_cache.documents import SkippedFiles, barred, no_text, text_of
from triforce.errors import RequestError, escaped
from triforce.user_files import (
    NotTextError,
    decode,
    kind,
    marked,
    open_file,
    read_all,
    read_file,
    read_line,
    unreadable,
)
from triforce.whole_file import why_unwritable

REQUESTS = "give a JSONL file of requests"


def read_text(file: str) -> str:
    """The text in a file, or on stdin for "-", in UTF-8 or as its mark says. Raises RequestError."""
    if file == STANDARD:
        return decode_text(read_all(sys.stdin.buffer, "stdin"), "stdin")
    return decode_text(read_file(file), file)


def read_document(file: str, options: Namespace) -> str:
    """The text in a file, on stdin for "-", or of a folder as it was read into the disk cache. Raises RequestError."""
    if file == STANDARD or not os.path.isdir(file):
        return read_text(file)
    cache = getattr(options, "disk_cache", None)
    left_out = SkippedFiles()
    network = getattr(options, "disk_cache_network", False)
    text = text_of(Path(file), Path(cache) if cache else None, network, left_out)
    tell_left_out(file, left_out)
    return text


def tell_left_out(folder: str | Path, left_out: SkippedFiles) -> None:
    """Say on one line what of a folder is left out, if anything is."""
    if left_out.summary:
        print(escaped(f"triforce: warning: left out of {folder}: {left_out.summary}"), file=sys.stderr, flush=True)


def read_texts(paths: Sequence[str]) -> dict[str, str]:
    """Texts by file name, of files and of those in folders. Raises RequestError."""
    read = [each for path in paths for each in (_texts_in(path) if os.path.isdir(path) else [(path, read_text(path))])]
    texts = {Path(file).name: text for file, text in read}
    if len(texts) < len({file for file, _ in read}):
        raise RequestError("two texts have one name, by which they are told apart; rename one of them")
    if not any(texts.values()):
        raise RequestError(f"{', '.join(texts)}: nothing is in there; give --texts some UTF-8 texts")
    return texts


def _texts_in(folder: str) -> list[tuple[str, str]]:
    """Return the files of a folder, not of those in it, that are texts; say what else is there. Raises RequestError."""
    texts = []
    left_out = SkippedFiles()
    try:
        entries = sorted(Path(folder).iterdir())
    except OSError as error:
        raise barred(Path(folder), error) from error
    for file in entries:
        if file.name.startswith("."):
            continue
        try:
            if os.path.isdir(file):
                left_out.add(file.name, "a folder in it; name it, too")
            else:
                with open_file(file, pipes=False) as opened:
                    texts.append((str(file), decode(read_all(opened, str(file)))))
        except (OSError, NotTextError) as error:
            left_out.add(file.name, error)
    if not texts:
        raise no_text(folder, left_out)
    tell_left_out(folder, left_out)
    return texts


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


def require_writable(file: str | None, option: str) -> None:
    """Raise RequestError if a file that an option names cannot be written: before minutes of work, not after them."""
    if not file:
        return
    path = Path(file)
    why = ""
    advice = "name another file"
    try:
        if os.path.isdir(path):
            why = "it is a folder"
            advice = f"name a file, such as {path / 'output'},"
        elif path.exists():
            why = why_unwritable(path)
        elif not path.parent.is_dir():
            why = f"there is no folder {path.parent}"
            advice = "name a file in a folder that exists"
        else:
            why = why_unwritable(path.parent)
            advice = "name a file in a folder of yours"
    except OSError as error:  # of a folder on the way
        why = str(error.strerror)
    if why:
        raise RequestError(f"{file} cannot be written ({why}); {advice} with {option}")


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


BOOK = "dracula.txt"
TITLE = "Dracula, by Bram Stoker"


def book_file() -> Path:
    """Return the file of the book."""
    return Path(str(resources.files("triforce"))) / "assets" / BOOK


def sample_book() -> str:
    """Return the text of the book."""
    return book_file().read_text(encoding="utf-8")
