"""Contents of users' files, up to MOST_BYTES, and their decoding. Ctrl-C takes effect between two pieces of a read."""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path
from typing import BinaryIO

from triforce.errors import RequestError

MOST_BYTES = 1 << 28
"""Largest text in bytes. No model's context holds more."""
PIECE = 1 << 20
"""Bytes of one read."""


def read_file(file: str | Path, advice: str = "give a text file", pipes: bool = True) -> bytes:
    """Return a file's content. pipes: whether pipes and terminals are read, too.

    Other devices are refused, as reading them may never end. Raises RequestError if the file cannot be read, is of
    another kind, or is larger than MOST_BYTES.
    """
    try:
        with open_file(file, advice, pipes) as opened:
            return read_all(opened, str(file), advice)
    except OSError as error:
        raise unreadable(file, error, advice) from error


def open_file(file: str | Path, advice: str = "give a text file", pipes: bool = True) -> BinaryIO:
    """Open a file for `read_all`. Raises RequestError for other kinds of files (see `read_file`), and OSError."""
    status = os.stat(file)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or (pipes and _has_end(file, status.st_mode))):
        raise RequestError(f"{file} is no regular file; {advice}")
    return open(file, "rb")


def read_all(opened: BinaryIO, source: str, advice: str = "give less") -> bytes:
    """Read the rest of an open file. Raises RequestError if it is larger than MOST_BYTES."""
    content = bytearray()
    if _size(opened) > MOST_BYTES:  # a sparse file may have any size
        raise _too_large(source, advice)
    while piece := opened.read(PIECE):
        content += piece
        if len(content) > MOST_BYTES:
            raise _too_large(source, advice)
        if len(piece) < PIECE:  # the end: another read would wait at a terminal
            break
    return bytes(content)


def read_line(opened: BinaryIO, source: str, advice: str = "give shorter lines") -> bytes:
    """Read a line; empty bytes at the end. Raises RequestError if it is larger than MOST_BYTES."""
    line = opened.readline(MOST_BYTES + 1)
    if len(line) > MOST_BYTES:
        raise _too_large(f"a line of {source}", advice)
    return line


def _too_large(source: str, advice: str) -> RequestError:
    return RequestError(f"{source} is larger than {MOST_BYTES >> 20:,} MiB, which no model's context holds; {advice}")


def unreadable(file: str | Path, error: OSError, advice: str = "give a text file") -> RequestError:
    """Return the error for a file that cannot be read."""
    return RequestError(f"{file} cannot be read ({error.strerror}); {advice}")


def _has_end(file: str | Path, mode: int) -> bool:
    """Return whether a special file has an end: a terminal, a pipe or a socket."""
    if stat.S_ISCHR(mode):
        with open(file, "rb", buffering=0) as opened:
            return opened.isatty()
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _size(opened: BinaryIO) -> int:
    """Return a file's size in bytes; 0 for a stream without a file."""
    try:
        return os.fstat(opened.fileno()).st_size
    except OSError:  # a Python stream without a file
        return 0


ENCODINGS_BY_MARK = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark is a prefix of this one
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}
"""Encodings by byte order mark."""

KINDS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"II*\0": "a TIFF picture",
    b"MM\0*": "a TIFF picture",
    b"%PDF-": "a PDF document (pdftotext extracts its text)",
    b"PK\x03\x04": "a ZIP archive (as are .docx, .xlsx, .odt and .epub files)",
    b"\xd0\xcf\x11\xe0": "a document of an old office program",
    b"\x1f\x8b": "a file compressed by gzip",
    b"BZh": "a file compressed by bzip2",
    b"\xfd7zXZ": "a file compressed by xz",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"GGUF": "a GGUF model",
    b"SQLite format 3\0": "an SQLite database",
    b"ID3": "an MP3 recording",
    b"OggS": "an Ogg recording",
}
"""Kinds of files that are no texts, by their first bytes."""
PLACED_KINDS = {(4, b"ftyp"): "a video", (8, b"WEBP"): "a WebP picture", (8, b"WAVE"): "a WAV recording"}
"""Kinds of files that are no texts, by offset and bytes there."""

SNIFFED_BYTES = 1 << 12
"""Bytes at the start of a text that are searched for an encoding without a mark."""
CONTROLS = frozenset(range(32)) - set(b"\t\n\v\f\r\x1b")
"""Control bytes, which occur in no text of an 8-bit encoding."""


CONVERT = "convert it: "
"""Start of the advice at the end of a message, before the command that converts a text."""


class NotTextError(ValueError):
    """Bytes are no text, or have an unsupported encoding. The message follows the name of the file in a sentence."""

    @property
    def conversion(self) -> str:
        """The command that converts the text; empty if none is known."""
        return str(self).partition(CONVERT)[2]


def decode(data: bytes) -> str:
    """Return a file's text without its byte order mark. Raises NotTextError naming the kind of the bytes."""
    mark = byte_order_mark(data)
    encoding = ENCODINGS_BY_MARK.get(mark, "utf-8")
    try:
        text = str(memoryview(data)[len(mark) :], encoding)
    except UnicodeDecodeError as error:
        raise NotTextError(_describe_undecodable(data, mark, encoding, error)) from error
    if not mark and "\0" in text and (description := binary_kind(data) or _unmarked_utf16(data)):
        raise NotTextError(description)
    return text


def byte_order_mark(data: bytes) -> bytes:
    """Return the byte order mark at the start of `data`; empty bytes if there is none."""
    return next((mark for mark in ENCODINGS_BY_MARK if data.startswith(mark)), b"")


def _describe_undecodable(data: bytes, mark: bytes, encoding: str, error: UnicodeDecodeError) -> str:
    """Return the message for bytes that are no text in `encoding`: their kind or the place of the fault, and advice."""
    fault = f"byte 0x{data[len(mark) + error.start]:02x} at offset {len(mark) + error.start}"
    if description := binary_kind(data) or ("" if mark else _unmarked_utf16(data)):
        return description
    if encoding != "utf-8":
        name = encoding[:6].upper()
        return f"has the byte order mark of {name}, but is not {name} ({fault}); save it as UTF-8"
    if error.reason == "unexpected end of data":
        cut = f"is not UTF-8 text ({fault}): the last character is cut off; complete or remove it"
        return f"{cut}; if it is in the usual encoding of Western Europe, {CONVERT}{_advice(data)}"
    if CONTROLS & set(data[:SNIFFED_BYTES]):
        return f"is not UTF-8 text ({fault}) but holds binary data; give a text file"
    return f"is not UTF-8 text ({fault}); if it is in the usual encoding of Western Europe, {CONVERT}{_advice(data)}"


def _advice(data: bytes) -> str:
    """Return a command that converts an 8-bit text: from CP1252 if it has Windows' quotes or dashes, else Latin-1."""
    try:
        data.decode("cp1252")
        is_cp1252 = any(0x80 <= byte < 0xA0 for byte in set(data))
    except UnicodeDecodeError:
        is_cp1252 = False
    return f"iconv -f {'CP1252' if is_cp1252 else 'LATIN1'} -t UTF-8"


def binary_kind(data: bytes) -> str:
    """Return the message for a known binary kind of file; empty if the kind is unknown."""
    kinds = [kind for start, kind in KINDS.items() if data.startswith(start)]
    kinds += [kind for (place, name), kind in PLACED_KINDS.items() if data[place : place + len(name)] == name]
    return f"is {kinds[0]}, not a text; give a text file" if kinds else ""


def _unmarked_utf16(data: bytes) -> str:
    """Return the message for UTF-16 without a mark, in which most characters have a NUL byte; else an empty text."""
    sample = data[:SNIFFED_BYTES] if len(data) % 2 == 0 else b""
    for encoding, high_offset, low_offset in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
        if not any(byte == 0 for byte in sample[low_offset::2]) and sample[high_offset::2].count(0) * 4 > len(sample):
            return f"is {encoding} without a byte order mark; {CONVERT}iconv -f {encoding} -t UTF-8"
    return ""
