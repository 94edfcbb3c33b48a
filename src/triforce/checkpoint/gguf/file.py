"""GGUF files: header, metadata and tensors, mapped into memory, and the choice between several files."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath
from struct import Struct
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from triforce.checkpoint.gguf.block_types import block_type
from triforce.errors import ModelError, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST_HEADER = 1 << 26
"""Bytes of the longest accepted header. The largest vocabularies take a quarter of it."""
ALIGNMENT = "general.alignment"
LONGEST_NAME = 256
DIMENSIONS = 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Numeric value types by their id in a file, as codes of `struct` and numpy."""
FLOAT32 = 6
TEXT = 8
ARRAY = 9
LEAST_ENTRY, LEAST_TENSOR = 13, 32
"""Bytes of the shortest metadata entry and of the shortest tensor description."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's description in the header."""

    dims: tuple[int, ...]
    """Sizes, innermost first."""
    type: int
    offset: int
    """Bytes from the start of the data."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file."""

    metadata: Mapping[str, Any]
    """Values by key: numbers, texts, lists of texts, and numpy arrays of numbers."""
    tensors: Mapping[str, TensorInfo]
    start: int
    """Byte offset of the data."""
    alignment: int


def read_header(data: mmap.mmap, file: Path) -> GGUFHeader:
    """Read the header at the start of `data`. Raises ModelError naming `file` and its fault."""
    _require_version(data, file)
    reader = _HeaderReader(data, file)
    tensor_count = reader.number("Q")
    entry_count = reader.number("Q")
    reader.require(entry_count, LEAST_ENTRY, "entries of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = reader.name()
        if key in metadata:
            reader.fail(f"its metadata has {key} twice")
        metadata[key] = reader.value(reader.number("I"))
    reader.require(tensor_count, LEAST_TENSOR, "tensors")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name = reader.name()
        if name in tensors:
            reader.fail(f"it has two tensors called {name}")
        tensors[name] = reader.tensor(name)
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"its {ALIGNMENT} is {_abridged(alignment)}, and not a power of two")
    return GGUFHeader(metadata, tensors, -(-reader.position // alignment) * alignment, alignment)


def _require_version(data: mmap.mmap, file: Path) -> None:
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


class _HeaderReader:
    """Sequential reader of header values. Each read is first checked against the remaining bytes."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data = data
        self._file = file
        self.position = 8
        self._end = min(len(data), LONGEST_HEADER)

    def number(self, code: str) -> Any:
        return self._take(_STRUCTS[code])

    def name(self) -> str:
        """Read the name of a value or a tensor, fit for messages. Raises ModelError."""
        (name,) = self._texts(1)
        if len(name) > LONGEST_NAME or not name.isprintable():
            self.fail(f"it has {_abridged(name)} for a name")
        return name

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            number = self.number(NUMBERS[kind])
            return _shortest_decimal(number) if kind == FLOAT32 else number
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

    def require(self, count: int, size: int, entry_kind: str) -> None:
        """Raise ModelError unless the remaining bytes can hold `count` entries of at least `size` bytes."""
        if count * size > self._end - self.position:
            self.fail(f"it announces {count} {entry_kind}, and has no room for them")

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._file} is broken: {reason} (before byte {self.position}); download it again")

    def _array(self, kind: int, count: int) -> list[str] | np.ndarray[Any, Any]:
        if kind == TEXT:
            self.require(count, 8, "texts")
            return self._texts(count)
        if kind not in NUMBERS:
            self.fail(f"a list of its metadata has items of type {kind}, which cannot be read")
        dtype = np.dtype(f"<{NUMBERS[kind]}" if kind != 7 else "?")
        self.require(count, dtype.itemsize, "numbers")
        items = np.frombuffer(self._data, dtype, count, self.position).copy()  # a view would keep the file mapped
        self.position += items.nbytes
        return items

    def _texts(self, count: int) -> list[str]:
        """Read texts; bytes that are no UTF-8 are replaced. This loop takes most of a header's time."""
        data = self._data
        position = self.position
        end = self._end
        length = _STRUCTS["Q"].unpack_from
        texts = []
        for _ in range(count):
            begin = position + 8
            if begin > end:
                self.fail("it ends within a text")
            position = begin + length(data, position)[0]
            if position > end:
                self.fail(f"it ends within a text of {position - begin} bytes")
            texts.append(data[begin:position].decode("utf-8", "replace"))
        self.position = position
        return texts

    def _take(self, form: Struct) -> Any:
        if self.position + form.size > self._end:
            self.fail("it ends within its header")
        (value,) = form.unpack_from(self._data, self.position)
        self.position += form.size
        return value


_STRUCTS = {code: Struct(f"<{code}") for code in NUMBERS.values()}


def _shortest_decimal(number: float) -> float:
    """Return the shortest decimal with the same float32: 1e-05 for 9.999999747e-06."""
    return float(str(np.float32(number)))


def _abridged(value: object) -> str:
    """Return a file's value for a message: one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Supported tensor types."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_ADVICE = getattr(mmap, "MADV_DONTNEED", None)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a file: its packing and its place."""

    name: str
    type: str
    """One of `READABLE`."""
    shape: tuple[int, ...]
    """Outputs first, inputs last: the reverse of ggml's order."""
    row_bytes: int
    """Bytes of a row, which has one element per input."""
    part: int
    start: int
    """Byte offset in the file number `part` of the set."""

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.rows * self.row_bytes


class GGUFFile:
    """A GGUF file, or the set of files that a model was split into."""

    def __init__(self, path: Path) -> None:
        """Open `path` and the other parts of its set beside it. No tensor is read yet.

        Raises ModelError naming the broken or missing file, or the tensor of an unsupported type.
        """
        self.path = path
        names = _parts_of_set(path)
        self._parts = [_Part(file) for file in names]
        for number, part in enumerate(self._parts):
            _require_part_number(part, number, len(names))
        self.metadata: Mapping[str, Any] = self._parts[0].header.metadata
        self.tensors: Mapping[str, GGUFTensor] = self._tensors()

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes, uint8 (outputs, bytes per row), as a read-only view of the mapped file."""
        tensor = self.tensors[name]
        bytes_N = np.frombuffer(self._parts[tensor.part].data, np.uint8, tensor.size, tensor.start)
        return bytes_N.reshape(tensor.rows, tensor.row_bytes)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory. A later read loads them from the file again."""
        tensor = self.tensors[name]
        begin = tensor.start - tensor.start % mmap.PAGESIZE
        if _ADVICE is not None:
            self._parts[tensor.part].data.madvise(_ADVICE, begin, tensor.start + tensor.size - begin)

    def _tensors(self) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(self._parts):
            for tensor in part.tensors(number):
                if tensor.name in tensors:
                    raise ModelError(f"{part.file} and another part both have {tensor.name}; download them again")
                tensors[tensor.name] = tensor
        total = _metadata_integer(self.metadata, "split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ModelError(
                f"{self.path}: split.tensors.count = {total}, but there are {len(tensors)} tensors; download it again"
            )
        return tensors


class _Part:
    """One mapped file of a set."""

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
        """Yield this file's tensors. Raises ModelError for a place outside the file or an unsupported type."""
        tensors = [self._tensor(name, info, part) for name, info in self.header.tensors.items()]
        for tensor_before, tensor_behind in pairwise(sorted(tensors, key=lambda tensor: tensor.start)):
            if tensor_before.start + tensor_before.size > tensor_behind.start:
                raise self._broken(f"tensors {tensor_before.name} and {tensor_behind.name} overlap")
        yield from tensors

    def _tensor(self, name: str, info: TensorInfo, part: int) -> GGUFTensor:
        inputs, *outputs = info.dims
        kind, block, size = block_type(info.type)
        if kind not in READABLE:
            raise ModelError(
                f"{self.file}: tensor {name} has type {kind}, which cannot be computed with "
                f"({', '.join(READABLE)} can); download the Q4_K_M file of this model"
            )
        if inputs % block:
            raise self._broken(f"tensor {name} has rows of {inputs}, which are no whole blocks of {kind}")
        if info.offset % self.header.alignment:
            raise self._broken(f"tensor {name} is not aligned to {self.header.alignment} bytes")
        start = self.header.start + info.offset
        row_bytes = inputs // block * size
        tensor = GGUFTensor(name, kind, (*reversed(outputs), inputs), row_bytes, part, start)
        if start + tensor.size > len(self.data):
            raise self._broken(f"tensor {name} ends {start + tensor.size - len(self.data)} bytes after the file")
        return tensor

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.file} is broken: {reason}; download it again")


def _parts_of_set(path: Path) -> list[Path]:
    """Return all files of the set of `path`, or `path` alone. Raises ModelError if a part is missing."""
    name = _PART.fullmatch(path.name)
    if not name:
        return [path]
    stem = name["stem"]
    count = int(name["count"])
    if not 1 <= int(name["number"]) <= count:
        raise ModelError(
            f"{path}: its name says part {int(name['number'])} of {count}; give it the name that it came with"
        )
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        further_parts = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{path} is one of {count} parts, and {missing[0]}{further_parts} is not beside it; download all parts"
        )
    return files


def _require_part_number(part: _Part, number: int, count: int) -> None:
    """Raise ModelError unless a file's metadata and its name give the same part number and count."""
    metadata = part.header.metadata
    metadata_place = _metadata_integer(metadata, "split.no", 0), max(_metadata_integer(metadata, "split.count", 1), 1)
    if metadata_place != (number, count):
        raise ModelError(
            f"{part.file} calls itself part {metadata_place[0] + 1} of {metadata_place[1]}, and its name "
            f"says {number + 1} of {count}; give all parts the names that they came with, NAME-0000x-of-0000n.gguf"
        )


def _metadata_integer(metadata: Mapping[str, Any], key: str, default: int) -> int:
    """Return an integer of the metadata; -1, which is no valid part number or count, for any other value."""
    value = metadata.get(key, default)
    return value if type(value) is int else -1


DEFAULT_QUANTISATION = "Q4_K_M"
NON_MODEL_PREFIXES = ("mmproj", "imatrix")
"""Name prefixes of files that are no language models: image projectors, calibration statistics."""
LOG = logging.getLogger("triforce.models")
"""Logger of the choice of files and of downloads. The command line shows it; a program sets its level to see it."""
_PART_NAME = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_QUANTISATION = re.compile(r"(I?Q|TQ|B?F|FP|MXFP|NVFP)\d+(_\w+)?", re.IGNORECASE)
"""Names of quantisations and of types of numbers, as files of models end with them."""


def choose_gguf(names: Iterable[str], quantisation: str, source: str) -> list[str]:
    """Return the files of one model, all parts of its set in order.

    names: files in `source`, of any kind. quantisation: end of the model's name, in upper or lower case. Empty: Q4_K_M,
    else the first single-file model, else the first set. Raises ModelError naming the available quantisations.
    """
    models: dict[str, list[str]] = {}
    for name in model_files(names):
        models.setdefault(_PART_NAME.sub("", name), []).append(name)
    matches = [
        files for model, files in models.items() if _has_quantisation(model, quantisation or DEFAULT_QUANTISATION)
    ]
    if not quantisation and not matches:
        matches = sorted(models.values(), key=lambda files: len(files) > 1)
    if not matches:
        quantisations = ", ".join(dict.fromkeys(_quantisation(model) or PurePosixPath(model).name for model in models))
        raise ModelError(
            f"{source} has no GGUF file of {quantisation}; it has {quantisations}"
            if models
            else f"{source} has no GGUF file of a model; name it without :{quantisation}"
        )
    return matches[0]


def log_choice(files: list[str], names: Iterable[str], source: str) -> None:
    """Log which files of `names` were chosen, if `source` has those of several models."""
    model_count = len({_PART_NAME.sub("", name) for name in model_files(names)})
    if model_count > 1:
        further_parts = f" and {len(files) - 1} more" if len(files) > 1 else ""
        LOG.info("taking %s%s of %d models in %s", files[0], further_parts, model_count, source)


def model_files(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files of models among `names`, sorted."""
    files = (name for name in names if name.endswith(".gguf"))
    return sorted(name for name in files if not PurePosixPath(name).name.lower().startswith(NON_MODEL_PREFIXES))


def model_names(names: Iterable[str]) -> set[str]:
    """Return the models' names among file names: without part number, quantisation and `.gguf`."""
    models = [_PART_NAME.sub("", name) for name in names]
    return {"-".join(_name_parts(model)[: -1 if _quantisation(model) else None]) for model in models}


def _quantisation(model: str) -> str:
    """Return the quantisation that a name ends with; an empty text if it ends with none."""
    name_part = _name_parts(model)[-1]
    return name_part if _QUANTISATION.fullmatch(name_part) else ""


def _has_quantisation(model: str, quantisation: str) -> bool:
    """Return whether a name ends with a quantisation, in upper or lower case."""
    quantisation_parts = _name_parts(f"{quantisation}.gguf")
    return [part.lower() for part in _name_parts(model)[-len(quantisation_parts) :]] == [
        part.lower() for part in quantisation_parts
    ]


def _name_parts(model: str) -> list[str]:
    """Return the parts of a name. A dot between digits is part of a number, such as 0.5b."""
    return re.split(r"-|(?<!\d)\.|\.(?!\d)", PurePosixPath(model).name.removesuffix(".gguf"))
