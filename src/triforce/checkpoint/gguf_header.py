"""The header of a GGUF file: metadata and where its tensors lie.

It is walked here rather than by `gguf.GGUFReader`: that one loops over counts as the file gives them, and takes 3 s for
a vocabulary of 49,000 tokens, 13 s for one of 152,000. Here every count and length is held against the bytes that are
left before anything is made of it, and headers end within `LONGEST` bytes, which bounds memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

import numpy as np

from triforce.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST = 1 << 26
"""Bytes of the longest header that is read. The largest vocabularies take a quarter of it."""
ALIGNMENT = "general.alignment"
LONGEST_NAME = 256
DIMENSIONS = 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values that are numbers, by their number in a file, as codes of `struct` and numpy."""
FLOAT32, TEXT, ARRAY = 6, 8, 9
LEAST_ENTRY, LEAST_TENSOR = 13, 32
"""Bytes of the shortest entry of metadata, and of the shortest description of a tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it."""

    dims: tuple[int, ...]
    """Sizes, the innermost first."""
    type: int
    offset: int
    """Bytes from the beginning of the data."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The part of a GGUF file before its data."""

    metadata: Mapping[str, Any]
    """Numbers, texts, lists of texts, and numpy arrays of numbers, by key."""
    tensors: Mapping[str, TensorInfo]
    start: int
    """Byte where the data begin."""
    alignment: int


def read_header(data: mmap, file: Path) -> GGUFHeader:
    """The header at the beginning of `data`. Raises ModelError naming `file` and what is wrong with it."""
    _require_version(data, file)
    walk = _Walk(data, file)
    tensors, entries = walk.number("Q"), walk.number("Q")
    walk.require(entries, LEAST_ENTRY, "entries of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = walk.name()
        if key in metadata:
            walk.fail(f"its metadata has {key} twice")
        metadata[key] = walk.value(walk.number("I"))
    walk.require(tensors, LEAST_TENSOR, "tensors")
    found: dict[str, TensorInfo] = {}
    for _ in range(tensors):
        name = walk.name()
        if name in found:
            walk.fail(f"it has two tensors called {name}")
        found[name] = walk.tensor(name)
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        walk.fail(f"its {ALIGNMENT} is {_short(alignment)}, and not a power of two")
    return GGUFHeader(metadata, found, -(-walk.at // alignment) * alignment, alignment)


def _require_version(data: mmap, file: Path) -> None:
    if data[:4] != MAGIC:
        raise ModelError(f"{file} is not a GGUF file, as it does not begin with GGUF; download it again")
    if len(data) < 24:
        raise ModelError(f"{file} is broken: it ends after {len(data)} bytes; download it again")
    version = int.from_bytes(data[4:8], "little")
    if version in VERSIONS:
        return
    if int.from_bytes(data[4:8], "big") in (1, *VERSIONS):
        raise ModelError(f"{file} was written for big-endian machines; download a little-endian file of this model")
    raise ModelError(
        f"{file} has version {version} of GGUF, and only {' and '.join(map(str, VERSIONS))} can be read; "
        "download a newer file of this model"
    )


class _Walk:
    """Values one after another. Each is held against the bytes that are left before it is taken."""

    def __init__(self, data: mmap, file: Path) -> None:
        self._data, self._file, self.at = data, file, 8
        self._end = min(len(data), LONGEST)

    def number(self, code: str) -> Any:
        return self._take(_STRUCTS[code])

    def name(self) -> str:
        """A name of a value or a tensor, which messages can show."""
        (name,) = self._texts(1)
        if len(name) > LONGEST_NAME or not name.isprintable():
            self.fail(f"it has {_short(name)} for a name")
        return name

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            number = self.number(NUMBERS[kind])
            return _shortest(number) if kind == FLOAT32 else number
        if kind == TEXT:
            return self._texts(1)[0]
        if kind == ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.fail(f"a value of its metadata has type {kind}, which does not exist")

    def tensor(self, name: str) -> TensorInfo:
        count = self.number("I")
        if not 1 <= count <= DIMENSIONS:
            self.fail(f"tensor {name} has {count} dimensions, and not 1 to {DIMENSIONS}")
        dims = tuple(self.number("Q") for _ in range(count))
        if 0 in dims:
            self.fail(f"tensor {name} has a dimension of 0")
        return TensorInfo(dims, self.number("I"), self.number("Q"))

    def require(self, count: int, size: int, what: str) -> None:
        """Raise ModelError unless so many things of at least `size` bytes each can follow."""
        if count * size > self._end - self.at:
            self.fail(f"it announces {count} {what}, and has no room for them")

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._file} is broken: {reason} (before byte {self.at}); download it again")

    def _array(self, kind: int, count: int) -> list[str] | np.ndarray[Any, Any]:
        if kind == TEXT:
            self.require(count, 8, "texts")
            return self._texts(count)
        if kind not in NUMBERS:
            self.fail(f"a list of its metadata has items of type {kind}, which cannot be read")
        dtype = np.dtype(f"<{NUMBERS[kind]}" if kind != 7 else "?")
        self.require(count, dtype.itemsize, "numbers")
        items = np.frombuffer(self._data, dtype, count, self.at).copy()  # a view would keep the file open
        self.at += items.nbytes
        return items

    def _texts(self, count: int) -> list[str]:
        """Texts, what is no UTF-8 in them replaced. The loop is most of the time that a header takes."""
        data, at, end, length = self._data, self.at, self._end, _STRUCTS["Q"].unpack_from
        found = []
        for _ in range(count):
            begin = at + 8
            if begin > end:
                self.fail("it ends within a text")
            at = begin + length(data, at)[0]
            if at > end:
                self.fail(f"it ends within a text of {at - begin} bytes")
            found.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def _take(self, form: Struct) -> Any:
        if self.at + form.size > self._end:
            self.fail("it ends within its header")
        (value,) = form.unpack_from(self._data, self.at)
        self.at += form.size
        return value


_STRUCTS = {code: Struct(f"<{code}") for code in NUMBERS.values()}


def _shortest(number: float) -> float:
    """Return the shortest decimal that is this float32: 1e-05, where its own value is 9.999999747e-06."""
    return float(str(np.float32(number)))


def _short(value: object) -> str:
    """Return a value from a file as a message may show it: on one line, and not for ever."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
