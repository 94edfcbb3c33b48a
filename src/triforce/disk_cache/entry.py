"""The format of an entry: a safetensors file whose last tensor is the BLAKE2b-256 of all bytes before it.

The checksum detects accidents. It is no protection against tampering: a process that may write to the folder can
recompute it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

FORMAT = "triforce-entry-1"
CHECKSUM = "checksum"
DIGEST_BYTES = 32
LONGEST_HEADER = 1 << 20
LENGTH_BYTES = 8
"""Bytes before the header, which hold its length."""
MOST_DIMENSIONS = 8
LARGEST_DIMENSION = 1 << 48
"""Largest dimension in a header that is accepted."""
TYPE_BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1}
"""Bytes of a number, by the name of its type."""


Buffer = bytes | memoryview


class DamagedEntry(Exception):
    """Raised for a file that was cut short or changed, or is no entry."""


class Part(NamedTuple):
    """One tensor: the name of its type, its shape, and its bytes."""

    kind: str
    shape: Sequence[int]
    data: memoryview


class PartPlace(NamedTuple):
    """The place of a tensor: the name of its type, its shape, and its bytes from `start` to `stop` of the file."""

    kind: str
    shape: list[int]
    start: int
    stop: int


class Header(NamedTuple):
    """Header of an entry: facts, places of its tensors without the checksum, and bytes of the whole file."""

    facts: dict[str, str]
    places: dict[str, PartPlace]
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Facts of an entry, all of them texts, and its tensors by name."""

    facts: Mapping[str, str]
    parts: Mapping[str, Part]

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(len(part.data) for part in self.parts.values())


def packed(entry: Entry) -> list[Buffer]:
    """Return the bytes of an entry's file in pieces."""
    shapes = {name: (part.kind, part.shape) for name, part in entry.parts.items()}
    head = file_head({**entry.facts, "format": FORMAT}, shapes)
    return list(sealed(head, (part.data for part in entry.parts.values())))


def file_head(facts: Mapping[str, str], shapes: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return the head of a safetensors file: its length in 8 bytes, then JSON with facts and the place of each tensor.

    shapes: type and shape of each tensor, by name, in the file's order. The checksum's tensor is added last.
    """
    tensor_headers: dict[str, object] = {"__metadata__": dict(facts)}
    end = 0
    for name, (kind, shape) in {**shapes, CHECKSUM: ("U8", [DIGEST_BYTES])}.items():
        start = end
        end = end + TYPE_BYTES[kind] * prod(shape)
        tensor_headers[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tensor_headers).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def sealed(head: bytes, data: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the head of a file, its data, and the checksum of both."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in chain([head], data):
        digest.update(piece)
        yield piece
    yield digest.digest()


def unpacked(content: bytearray) -> Entry:
    """Return the entry of these bytes, which `packed` made. Its tensors are views of them. Raises DamagedEntry."""
    buffer = memoryview(content)
    _require_whole(buffer)
    facts, places, size = header(buffer)
    if size != len(buffer):
        raise DamagedEntry("its size is not that of its header")
    parts = {name: Part(place.kind, place.shape, buffer[place.start : place.stop]) for name, place in places.items()}
    return Entry(facts, parts)


def _require_whole(content: memoryview) -> None:
    if len(content) <= LENGTH_BYTES + DIGEST_BYTES:
        raise DamagedEntry("it is cut short")
    if hashlib.blake2b(content[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest() != content[-DIGEST_BYTES:]:
        raise DamagedEntry("its checksum does not hold")


def header_length(beginning: bytes) -> int:
    """Return the bytes of a header and of the length before it. beginning: the first 8 bytes of the file.

    The result is bounded by `LONGEST_HEADER` for any bytes.
    """
    return LENGTH_BYTES + min(int.from_bytes(beginning[:LENGTH_BYTES], "little"), LONGEST_HEADER)


def header(beginning: memoryview) -> Header:
    """Return the header in the first bytes of a file. Raises DamagedEntry."""
    size = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if not 0 < size <= min(len(beginning) - LENGTH_BYTES, LONGEST_HEADER):
        raise DamagedEntry("its header is cut short")
    try:
        tensor_headers = json.loads(bytes(beginning[LENGTH_BYTES : LENGTH_BYTES + size]))
        facts = tensor_headers.pop("__metadata__")
        if facts.pop("format") != FORMAT:
            raise DamagedEntry("it is of another format")
        places = _places(tensor_headers, LENGTH_BYTES + size)
        checksum = places.pop(CHECKSUM)
        if not all(isinstance(fact, str) for fact in facts.values()) or checksum.shape != [DIGEST_BYTES]:
            raise DamagedEntry("its header is not that of an entry")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry("its header is not that of an entry") from error
    return Header(facts, places, checksum.stop)


def _places(tensor_headers: dict[str, Any], start: int) -> dict[str, PartPlace]:
    """Return the places of tensors, which must be contiguous from `start` on.

    Raises DamagedEntry, KeyError or TypeError.
    """
    places = {}
    begin = start
    for name, tensor_header in tensor_headers.items():
        kind = tensor_header["dtype"]
        shape = tensor_header["shape"]
        if len(shape) > MOST_DIMENSIONS or not all(
            type(size) is int and 0 <= size <= LARGEST_DIMENSION for size in shape
        ):
            raise DamagedEntry("its tensors have no shape")
        places[name] = PartPlace(kind, shape, begin, begin + TYPE_BYTES[kind] * prod(shape))
        if tensor_header["data_offsets"] != [begin - start, places[name].stop - start]:
            raise DamagedEntry("its tensors are not as large as it says")
        begin = places[name].stop
    return places
