"""Bytes of files that users name: no more than a text has, read in pieces, so that Ctrl-C is heard between them."""

from __future__ import annotations

import codecs
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


MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}
"""Byte order marks, and the encodings that they announce."""

KINDS = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"II*\0": "a TIFF picture",
    b"MM\0*": "a TIFF picture",
    b"%PDF-": "a PDF document, whose text pdftotext extracts",
    b"PK\x03\x04": "a ZIP archive, which .docx, .xlsx, .odt and .epub files are, too",
    b"\xd0\xcf\x11\xe0": "a document of an old office program",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"GGUF": "a GGUF model",
    b"SQLite format 3\0": "an SQLite database",
    b"ID3": "an MP3 recording",
    b"OggS": "an Ogg recording",
}
"""First bytes of files that are no texts, and what such a file is."""
PLACED_KINDS = {(4, b"ftyp"): "a video", (8, b"WEBP"): "a WebP picture", (8, b"WAVE"): "a WAV recording"}
"""The same for bytes at a later place."""

LOOKED_AT = 1 << 12
"""Bytes of the beginning by which an encoding without a mark is told."""
CONTROLS = frozenset(range(32)) - set(b"\t\n\v\f\r\x1b")
"""Bytes that no text in an 8-bit encoding has."""


CONVERT = "convert it: "
"""Before the command that converts a text, which ends a message."""


class NotTextError(ValueError):
    """Bytes that are no text, or none in an encoding that is read. The message goes behind the name of the file."""

    @property
    def conversion(self) -> str:
        """The command that converts the text; nothing where none is known to."""
        return str(self).partition(CONVERT)[2]


def decode(data: bytes) -> str:
    """Return the text of a file without its byte order mark. Raises NotTextError saying what the bytes are."""
    mark = marked(data)
    encoding = MARKS.get(mark, "utf-8")
    try:
        text = str(memoryview(data)[len(mark) :], encoding)
    except UnicodeDecodeError as error:
        raise NotTextError(_told(data, mark, encoding, error)) from error
    if not mark and "\0" in text and (other := kind(data) or _unmarked(data)):
        raise NotTextError(other)
    return text


def marked(data: bytes) -> bytes:
    """Return the byte order mark that bytes begin with; nothing where there is none."""
    return next((mark for mark in MARKS if data.startswith(mark)), b"")


def _told(data: bytes, mark: bytes, encoding: str, error: UnicodeDecodeError) -> str:
    """Return what bytes are that `encoding` does not have."""
    place = f"byte 0x{data[len(mark) + error.start]:02x} at offset {len(mark) + error.start}"
    if other := kind(data) or ("" if mark else _unmarked(data)):
        return other
    if encoding != "utf-8":
        return f"begins as {encoding[:6].upper()} and is not ({place}); save it as UTF-8"
    if error.reason == "unexpected end of data":
        return f"is not UTF-8 text ({place}): it ends within a character; end it behind a whole one"
    if CONTROLS & set(data[:LOOKED_AT]):
        return f"is not UTF-8 text ({place}) but holds binary data; give a text file"
    return f"is not UTF-8 text ({place}); if it is in the usual encoding of Western Europe, {CONVERT}{_advice(data)}"


def _advice(data: bytes) -> str:
    """Return a command that converts a text: every byte is a character of Latin-1, quotes and dashes are Windows'."""
    try:
        data.decode("cp1252")
        windows = any(0x80 <= byte < 0xA0 for byte in set(data))
    except UnicodeDecodeError:
        windows = False
    return f"iconv -f {'CP1252' if windows else 'LATIN1'} -t UTF-8"


def kind(data: bytes) -> str:
    """Return what a file is that begins as no text does; nothing where that is not known."""
    kinds = [kind for start, kind in KINDS.items() if data.startswith(start)]
    kinds += [kind for (place, name), kind in PLACED_KINDS.items() if data[place : place + len(name)] == name]
    return f"is {kinds[0]}, not a text; give a text file" if kinds else ""


def _unmarked(data: bytes) -> str:
    """Return what text in UTF-16 without a mark is: of pairs of bytes, one byte of most of which is NUL."""
    beginning = data[:LOOKED_AT] if len(data) % 2 == 0 else b""
    for encoding, high, low in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
        if not any(byte == 0 for byte in beginning[low::2]) and beginning[high::2].count(0) * 4 > len(beginning):
            return f"is {encoding} without a byte order mark; {CONVERT}iconv -f {encoding} -t UTF-8"
    return ""
