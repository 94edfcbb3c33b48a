"""Texts from files and stdin, and files for figures."""

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

from triforce.cli.options import STANDARD_STREAM
from triforce.disk_cache.documents import SkippedFiles, no_text, text_of, unreadable_folder
from triforce.errors import RequestError, escaped
from triforce.user_files import (
    NotTextError,
    binary_kind,
    byte_order_mark,
    decode,
    open_file,
    read_all,
    read_file,
    read_line,
    unreadable,
)
from triforce.whole_file import why_unwritable

REQUESTS_ADVICE = "give a JSONL file of requests"


def read_text(file: str) -> str:
    """Return the text in a file, or on stdin for "-", in UTF-8 or by its byte order mark. Raises RequestError."""
    if file == STANDARD_STREAM:
        return decode_text(read_all(sys.stdin.buffer, "stdin"), "stdin")
    return decode_text(read_file(file), file)


def read_document(file: str, options: Namespace) -> str:
    """Return the text of a file, stdin ("-"), or a folder in the order of the disk cache. Raises RequestError."""
    if file == STANDARD_STREAM or not os.path.isdir(file):
        return read_text(file)
    cache = getattr(options, "disk_cache", None)
    left_out = SkippedFiles()
    network = getattr(options, "disk_cache_network", False)
    text = text_of(Path(file), Path(cache) if cache else None, network, left_out)
    tell_left_out(file, left_out)
    return text


def tell_left_out(folder: str | Path, left_out: SkippedFiles) -> None:
    """Print to stderr, on one line, the files of a folder that are left out, if any."""
    if left_out.summary:
        print(escaped(f"triforce: warning: left out of {folder}: {left_out.summary}"), file=sys.stderr, flush=True)


def read_texts(paths: Sequence[str]) -> dict[str, str]:
    """Return texts by file name, of files and of the files in folders. Raises RequestError."""
    file_texts = [
        file_text
        for path in paths
        for file_text in (_texts_in(path) if os.path.isdir(path) else [(path, read_text(path))])
    ]
    texts = {Path(file).name: text for file, text in file_texts}
    if len(texts) < len({file for file, _ in file_texts}):
        raise RequestError("two texts have the same file name; rename one of them")
    if not any(texts.values()):
        raise RequestError(f"{', '.join(texts)}: there is no text in it; give --texts some UTF-8 texts")
    return texts


def _texts_in(folder: str) -> list[tuple[str, str]]:
    """Return name and text of each text file of a folder, without its subfolders; print what is left out.

    Raises RequestError.
    """
    texts = []
    left_out = SkippedFiles()
    try:
        entries = sorted(Path(folder).iterdir())
    except OSError as error:
        raise unreadable_folder(Path(folder), error) from error
    for file in entries:
        if file.name.startswith("."):
            continue
        try:
            if os.path.isdir(file):
                left_out.add(file.name, "a subfolder; name it, too")
            else:
                with open_file(file, pipes=False) as stream:
                    texts.append((str(file), decode(read_all(stream, str(file)))))
        except (OSError, NotTextError) as error:
            left_out.add(file.name, error)
    if not texts:
        raise no_text(folder, left_out)
    tell_left_out(folder, left_out)
    return texts


def stdin_lines() -> Iterator[bytes]:
    """Yield the lines of stdin as they come. Text with a byte order mark is read whole first. Raises RequestError."""
    first_line = read_line(sys.stdin.buffer, "stdin")
    yield from _lines(first_line, sys.stdin.buffer, "stdin")


def open_lines(file: str) -> BinaryIO:
    """Return a seekable stream, at its start, of a file's lines, or stdin's for "-", in UTF-8. Raises RequestError."""
    if file == STANDARD_STREAM:
        return io.BytesIO(decode_text(read_all(sys.stdin.buffer, "stdin", "name a file instead"), "stdin").encode())
    try:
        with ExitStack() as exit_stack:
            stream = exit_stack.enter_context(open_file(file, REQUESTS_ADVICE))
            first_line = read_line(stream, file)
            if file_kind := binary_kind(first_line):
                raise RequestError(f"{file} {file_kind}")
            if byte_order_mark(first_line) or not stream.seekable():
                return io.BytesIO(b"".join(_lines(first_line, stream, file)))
            stream.seek(0)
            exit_stack.pop_all()
            return stream
    except OSError as error:
        raise unreadable(file, error, REQUESTS_ADVICE) from error


def count_lines(stream: BinaryIO, source: str) -> int:
    """Return the number of nonempty lines that follow. Raises RequestError for a line that is too large."""
    return sum(bool(line.strip()) for line in iter(lambda: read_line(stream, source), b""))


def _lines(line: bytes, stream: BinaryIO, source: str) -> Iterator[bytes]:
    """Yield lines of UTF-8 text: `line`, which was read before, then those of `stream`. Raises RequestError."""
    if byte_order_mark(line):
        yield from decode_text(line + read_all(stream, source), source).encode().splitlines(keepends=True)
        return
    while line:
        yield line
        line = read_line(stream, source)


def decode_text(data: bytes, source: str) -> str:
    """Return bytes as text. Raises RequestError, which says what `source` is instead."""
    try:
        return decode(data)
    except NotTextError as error:
        raise RequestError(f"{source} {error}") from error


def require_writable(file: str | None, option: str) -> None:
    """Raise RequestError if the file that `option` names cannot be written: before minutes of work, not after them."""
    if not file:
        return
    path = Path(file)
    reason = ""
    advice = "name another file"
    try:
        if os.path.isdir(path):
            reason = "it is a folder"
            advice = f"name a file, such as {path / 'output'},"
        elif path.exists():
            reason = why_unwritable(path)
        elif not path.parent.is_dir():
            reason = f"there is no folder {path.parent}"
            advice = "name a file in a folder that exists"
        else:
            reason = why_unwritable(path.parent)
            advice = "name a file in a folder of yours"
    except OSError as error:  # raised for a parent folder
        reason = str(error.strerror)
    if reason:
        raise RequestError(f"{file} cannot be written ({reason}); {advice} with {option}")


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
