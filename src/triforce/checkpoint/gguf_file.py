"""GGUF files, whole or in parts, mapped into memory: metadata, and tensors as the bytes that they are packed in."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.checkpoint.gguf_header import GGUFHeader, TensorInfo, read_header
from triforce.checkpoint.unreadable_file import unreadable
from triforce.errors import ModelError

READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types of tensors that can be computed with."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_ADVICE = getattr(mmap, "MADV_DONTNEED", None)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a file: how it is packed, and where."""

    name: str
    type: str
    """One of `READABLE`."""
    shape: tuple[int, ...]
    """Outputs first, inputs last: the reverse of ggml's order."""
    row_bytes: int
    """Bytes of a row, which is of inputs."""
    part: int
    start: int
    """Byte of the part where its bytes begin."""

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.rows * self.row_bytes


class GGUFFile:
    """A GGUF file, or the set of files that a model was split into."""

    def __init__(self, path: Path) -> None:
        """Open `path`, and the other parts of its set, which lie beside it. No tensor is read yet.

        Raises ModelError naming the file that is broken or missing, or the tensor whose type cannot be computed with.
        """
        self.path = path
        names = _set_of(path)
        self._parts = [_Part(file) for file in names]
        for number, part in enumerate(self._parts):
            _require_place(part, number, len(names))
        self.metadata: Mapping[str, Any] = self._parts[0].header.metadata
        self.tensors: Mapping[str, GGUFTensor] = self._tensors()

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 (outputs, bytes per row): a read-only view of the mapped file."""
        tensor = self.tensors[name]
        whole = np.frombuffer(self._parts[tensor.part].data, np.uint8, tensor.size, tensor.start)
        return whole.reshape(tensor.rows, tensor.row_bytes)

    def release(self, name: str) -> None:
        """Let the pages of a tensor leave memory. They come back from the file if anything reads them again."""
        tensor = self.tensors[name]
        begin = tensor.start - tensor.start % mmap.PAGESIZE
        if _ADVICE is not None:
            self._parts[tensor.part].data.madvise(_ADVICE, begin, tensor.start + tensor.size - begin)

    def _tensors(self) -> dict[str, GGUFTensor]:
        found: dict[str, GGUFTensor] = {}
        for number, part in enumerate(self._parts):
            for tensor in part.tensors(number):
                if tensor.name in found:
                    raise ModelError(f"{part.file} and another part both have {tensor.name}; download them again")
                found[tensor.name] = tensor
        total = _whole(self.metadata, "split.tensors.count", len(found))
        if total != len(found):
            raise ModelError(
                f"{self.path}: split.tensors.count = {total}, but there are {len(found)} tensors; download it again"
            )
        return found


class _Part:
    """One file, mapped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            if not file.stat().st_size:
                raise ModelError(f"{file} is empty; download it again")
            with file.open("rb") as opened:
                self.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(file, error) from error
        self.header: GGUFHeader = read_header(self.data, file)

    def tensors(self, part: int) -> Iterator[GGUFTensor]:
        """Yield the tensors of this file. Raises ModelError if one lies where it cannot, or has an unknown type."""
        found = [self._tensor(name, info, part) for name, info in self.header.tensors.items()]
        for one, other in pairwise(sorted(found, key=lambda tensor: tensor.start)):
            if one.start + one.size > other.start:
                raise self._broken(f"tensors {one.name} and {other.name} overlap")
        yield from found

    def _tensor(self, name: str, info: TensorInfo, part: int) -> GGUFTensor:
        inputs, *outputs = info.dims
        kind, block, size = _packing(info.type)
        if kind not in READABLE:
            raise ModelError(
                f"{self.file}: tensor {name} has type {kind}, which cannot be computed with "
                f"({', '.join(READABLE)} can); download the Q4_K_M file of this model"
            )
        if inputs % block:
            raise self._broken(f"tensor {name} has rows of {inputs}, which are no whole blocks of {kind}")
        if info.offset % self.header.alignment:
            raise self._broken(f"tensor {name} is not aligned to {self.header.alignment} bytes")
        start, row = self.header.start + info.offset, inputs // block * size
        tensor = GGUFTensor(name, kind, (*reversed(outputs), inputs), row, part, start)
        if start + tensor.size > len(self.data):
            raise self._broken(f"tensor {name} ends {start + tensor.size - len(self.data)} bytes after the file")
        return tensor

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.file} is broken: {reason}; download it again")


def _packing(number: int) -> tuple[str, int, int]:
    """Return the name of a type, the elements of a block of it, and the bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.1 s, which only GGUF models pay for

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return f"number {number}", 1, 1
    return (kind.name, *GGML_QUANT_SIZES[kind])


def _set_of(path: Path) -> list[Path]:
    """Return all files of the set that `path` is a part of, or itself alone. Raises ModelError if some are missing."""
    name = _PART.fullmatch(path.name)
    if not name:
        return [path]
    stem, count = name["stem"], int(name["count"])
    if not 1 <= int(name["number"]) <= count:
        raise ModelError(
            f"{path}: its name says part {int(name['number'])} of {count}; give it the name that it came with"
        )
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} is one of {count} parts, and {missing[0]}{more} is not beside it; download all parts")
    return files


def _require_place(part: _Part, number: int, count: int) -> None:
    """Raise ModelError unless the metadata of a file say of its place in the set what the names say."""
    said = part.header.metadata
    place = _whole(said, "split.no", 0), max(_whole(said, "split.count", 1), 1)
    if place != (number, count):
        raise ModelError(
            f"{part.file} calls itself part {place[0] + 1} of {place[1]}, and its name says {number + 1} of {count}; "
            "give all parts the names that they came with, NAME-0000x-of-0000n.gguf"
        )


def _whole(metadata: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number of the metadata; -1 for anything else, which no place and no count is."""
    value = metadata.get(key, default)
    return value if type(value) is int else -1
