"""Texts from files and stdin, and files that figures go to."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from triforce.disk_cache.manifest import text_of
from triforce.errors import RequestError


def read_text(file: str) -> str:
    """The text in a file, or on stdin for "-", byte for byte. Raises RequestError."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise RequestError(f"{file} cannot be read ({error.strerror}); give a text file") from error
    return decode_text(data, "stdin" if file == "-" else file)


def read_document(file: str, options: Namespace) -> str:
    """The text in a file, on stdin for "-", or of a folder as it was read into the disk cache. Raises RequestError."""
    if file == "-" or not Path(file).is_dir():
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
    return texts


def _files(path: Path) -> list[Path]:
    """The files of a folder, not of those in it; or a file itself."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))


def decode_text(data: bytes, source: str) -> str:
    """UTF-8 bytes as text. Raises RequestError saying where `source` is something else."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); "
            "convert it first, for example with iconv -t UTF-8"
        ) from error


def require_writable(file: str | None) -> None:
    """Raise RequestError if figures cannot be written to `file`: before the minutes of measuring, not after them."""
    path = Path(file).absolute() if file else None
    if path and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise RequestError(f"{file} cannot be written; name a file in a folder that exists")
