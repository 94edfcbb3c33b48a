"""GGUF files: header, metadata and tensors, mapped into memory, and the choice of one file among several."""

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

from triforce.errors import ModelError, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LONGEST = 1 << 26
"""Bytes of the longest header that is read. The largest vocabularies take a quarter of it."""
ALIGNMENT = "general.alignment"
LONGEST_NAME = 256
DIMENSIONS = 4
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values that are numbers, by their number in a file, as codes of `struct` and numpy."""
FLOAT32 = 6
TEXT = 8
ARRAY = 9
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


def read_header(data: mmap.mmap, file: Path) -> GGUFHeader:
    """The header at the beginning of `data`. Raises ModelError naming `file` and what is wrong with it."""
    _require_version(data, file)
    walk = _Walk(data, file)
    tensors = walk.number("Q")
    entries = walk.number("Q")
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


class _Walk:
    """Values one after another. Each is held against the bytes that are left before it is taken."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data = data
        self._file = file
        self.at = 8
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
        data = self._data
        at = self.at
        end = self._end
        length = _STRUCTS["Q"].unpack_from
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
        start = self.header.start + info.offset
        row = inputs // block * size
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
    stem = name["stem"]
    count = int(name["count"])
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


USUAL = "Q4_K_M"
NO_MODELS = ("mmproj", "imatrix")
"""How names of files begin that are no language models: projections of images, statistics of a calibration."""
LOG = logging.getLogger("triforce.models")
"""Says what is chosen and fetched. The command line shows it; a program that wants to hear it sets its level."""
_PART_NAME = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_QUANTISATION = re.compile(r"(I?Q|TQ|B?F|FP|MXFP|NVFP)\d+(_\w+)?", re.IGNORECASE)
"""Names of quantisations and of types of numbers, as files of models end with them."""


def choose_gguf(names: Iterable[str], quantisation: str, where: str) -> list[str]:
    """Return the files of one model, all parts of its set in order.

    names: files in `where`, others than GGUF among them. quantisation: as its name ends, in any case; empty for
    Q4_K_M, or the first file that is a model by itself, or the first set. Raises ModelError naming what is there.
    """
    models: dict[str, list[str]] = {}
    for name in model_files(names):
        models.setdefault(_PART_NAME.sub("", name), []).append(name)
    named = [files for whole, files in models.items() if _is_of(whole, quantisation or USUAL)]
    if not quantisation and not named:
        named = sorted(models.values(), key=lambda files: len(files) > 1)
    if not named:
        there = ", ".join(dict.fromkeys(_quantisation(whole) or PurePosixPath(whole).name for whole in models))
        raise ModelError(
            f"{where} has no GGUF file of {quantisation}; it has {there}"
            if models
            else f"{where} has no GGUF file of a model; name it without :{quantisation}"
        )
    if len(models) > 1:
        more = f" and {len(named[0]) - 1} more" if len(named[0]) > 1 else ""
        LOG.info("taking %s%s of %d models in %s", named[0][0], more, len(models), where)
    return named[0]


def model_files(names: Iterable[str]) -> list[str]:
    """Return those of some names that are of GGUF files of models, in their order."""
    files = (name for name in names if name.endswith(".gguf"))
    return sorted(name for name in files if not PurePosixPath(name).name.lower().startswith(NO_MODELS))


def model_names(names: Iterable[str]) -> set[str]:
    """Return the names of models among file names: without number of a part, quantisation and `.gguf`."""
    wholes = [_PART_NAME.sub("", name) for name in names]
    return {"-".join(_pieces(whole)[: -1 if _quantisation(whole) else None]) for whole in wholes}


def _quantisation(whole: str) -> str:
    """Return the quantisation that a name ends with; nothing where it ends with none."""
    piece = _pieces(whole)[-1]
    return piece if _QUANTISATION.fullmatch(piece) else ""


def _is_of(whole: str, quantisation: str) -> bool:
    """Whether the last pieces of a name are a quantisation's."""
    wanted = _pieces(f"{quantisation}.gguf")
    return [piece.lower() for piece in _pieces(whole)[-len(wanted) :]] == [piece.lower() for piece in wanted]


def _pieces(whole: str) -> list[str]:
    """Return the parts of a name. A dot between digits is one of a number, such as 0.5b."""
    return re.split(r"-|(?<!\d)\.|\.(?!\d)", PurePosixPath(whole).name.removesuffix(".gguf"))
