"""The format of an entry: a safetensors file whose last tensor is the BLAKE2b-256 of all bytes before it.

The checksum finds accidents. Whoever may write to the folder can make it anew: it is no protection against tampering.
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
DIGEST = 32
LONGEST_HEADER = 1 << 20
LENGTH = 8
"""Bytes before the header, which say how long it is."""
BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1}
"""Of a number, by the name of its type."""


Buffer = bytes | memoryview


class DamagedEntry(Exception):
    """An entry that was cut short or changed, or is none."""


class Part(NamedTuple):
    """One tensor: the name of its type, its shape, and its bytes."""

    kind: str
    shape: Sequence[int]
    data: memoryview


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
    """Return the bytes of a file, piece by piece."""
    shapes = {name: (part.kind, part.shape) for name, part in entry.parts.items()}
    head = beginning({**entry.facts, "format": FORMAT}, shapes)
    return list(sealed(head, (part.data for part in entry.parts.values())))


def beginning(facts: Mapping[str, str], shapes: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Return the head of a safetensors file: its length in 8 bytes, then JSON with facts and the place of each tensor.

    shapes: by name the type and the shape of each, in their order. A checksum comes last.
    """
    placed: dict[str, object] = {"__metadata__": dict(facts)}
    end = 0
    for name, (kind, shape) in {**shapes, CHECKSUM: ("U8", [DIGEST])}.items():
        start, end = end, end + BYTES[kind] * prod(shape)
        placed[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(placed).encode()
    text += b" " * (-len(text) % LENGTH)
    return len(text).to_bytes(LENGTH, "little") + text


def sealed(head: bytes, data: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the head of a file, its data, and the checksum of both."""
    digest = hashlib.blake2b(digest_size=DIGEST)
    for piece in chain([head], data):
        digest.update(piece)
        yield piece
    yield digest.digest()


def unpacked(content: bytearray) -> Entry:
    """Return the entry that `packed` made these bytes of; its tensors lie in them. Raises DamagedEntry."""
    whole = memoryview(content)
    _require_whole(whole)
    facts, placed, start = header(whole)
    try:
        parts = {
            name: Part(about["dtype"], about["shape"], whole[slice(*(start + at for at in about["data_offsets"]))])
            for name, about in placed.items()
            if name != CHECKSUM
        }
        if any(len(part.data) != BYTES[part.kind] * prod(part.shape) for part in parts.values()):
            raise DamagedEntry("its tensors are not as large as it says")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedEntry("its header is not that of an entry") from error
    return Entry(facts, parts)


def _require_whole(content: memoryview) -> None:
    if len(content) <= LENGTH + DIGEST:
        raise DamagedEntry("it is cut short")
    if hashlib.blake2b(content[:-DIGEST], digest_size=DIGEST).digest() != content[-DIGEST:]:
        raise DamagedEntry("its checksum does not hold")


def header(beginning: memoryview) -> tuple[dict[str, str], dict[str, Any], int]:
    """Return facts, places of tensors, and where these begin, from the first bytes of a file. Raises DamagedEntry."""
    size = int.from_bytes(beginning[:LENGTH], "little")
    if not 0 < size <= min(len(beginning) - LENGTH, LONGEST_HEADER):
        raise DamagedEntry("its header is cut short")
    try:
        placed = json.loads(bytes(beginning[LENGTH : LENGTH + size]))
        facts = placed.pop("__metadata__")
        if facts.pop("format") != FORMAT:
            raise DamagedEntry("it is of another format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedEntry("its header is not that of an entry") from error
    return facts, placed, LENGTH + size
