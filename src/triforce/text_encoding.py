"""Bytes of a user's file as text: UTF-8, or what its byte order mark says. Other bytes are told by what they are."""

from __future__ import annotations

import codecs

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
    """Return what text in UTF-16 without a mark is: every other byte of most of its characters is NUL."""
    beginning = data[:LOOKED_AT]
    for encoding, high, low in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
        if not any(byte == 0 for byte in beginning[low::2]) and beginning[high::2].count(0) * 4 > len(beginning):
            return f"is {encoding} without a byte order mark; {CONVERT}iconv -f {encoding} -t UTF-8"
    return ""
