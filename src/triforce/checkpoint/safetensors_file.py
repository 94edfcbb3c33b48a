"""The safetensors format: the place of each tensor in a file, and arrays as a file.

A file is the size of its header (eight bytes), the header (JSON), and the tensors' numbers. Hugging Face's own library
is not used: its views of bfloat16 need torch, and its writer's arguments change between versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, DType, dtype_name

MAX_HEADER_BYTES = 100_000_000
MAX_NUMBERS = (1 << 64) - 1
METADATA = "__metadata__"
"""Key of the header for texts about the file."""
LENGTH_BYTES = 8
"""Bytes of the header's size, at the start of a file."""
DTYPES: dict[str, DType] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Names of the types that have host arrays. Other types keep the name of the format, such as F8_E4M3."""
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of a number of each type."""


class StoredTensor(NamedTuple):
    """A tensor's type, its shape, and its place in the file in bytes."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    size: int

    def array(self, data: mmap) -> NDArray[Any]:
        """Return the tensor as a view of the mapped file. Raises ValueError for a type without host arrays.

        A tensor whose numbers are not aligned in memory is copied.
        """
        if self.dtype not in DTYPES.values():
            raise ValueError(f"its type, {self.dtype}, has no arrays")
        dtype = HOST_TYPES.get(self.dtype) or np.dtype(self.dtype)
        bytes_N = np.frombuffer(data, np.uint8, self.size, self.start)
        numbers_N = bytes_N.view(dtype) if self.start % dtype.itemsize == 0 else bytes_N.copy().view(dtype)
        return numbers_N.reshape(self.shape)


def stored_tensors(data: mmap) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, in the order of its header. Raises ValueError naming the header's fault.

    The tensors fill the file: they neither overlap nor leave gaps.
    """
    if len(data) < LENGTH_BYTES:
        raise ValueError("it is shorter than the size of a header")
    header_size = int.from_bytes(data[:LENGTH_BYTES], "little")
    if header_size > MAX_HEADER_BYTES:
        raise ValueError(f"its header is to have {header_size} bytes, more than {MAX_HEADER_BYTES}")
    start = LENGTH_BYTES + header_size
    if start > len(data):
        raise ValueError(f"its header is to have {header_size} bytes, more than the file")
    header = _parsed(data[LENGTH_BYTES:start])
    tensors = {name: _stored_tensor(name, info, start) for name, info in header.items() if name != METADATA}
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != start:
            raise ValueError(f"tensor {name} does not begin where the one before it ends")
        start += tensor.size
    if start != len(data):
        raise ValueError(f"its tensors end at byte {start}, and the file at byte {len(data)}")
    return tensors


def _parsed(text: bytes) -> dict[str, Any]:
    """Return the header's fields by name. Raises ValueError unless names are unique texts."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique_fields)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.get(METADATA)
    is_texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not is_texts:
        raise ValueError(f"its {METADATA} are no texts")
    return header


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("its header has a name twice")
    "".join(fields).encode()  # half a pair of surrogates raises UnicodeEncodeError, which is a ValueError
    return fields


def _stored_tensor(name: str, info: Any, data_start: int) -> StoredTensor:
    """Return a tensor by its fields in the header. data_start: byte at which the numbers of all tensors begin."""
    if not isinstance(info, dict):
        raise ValueError(f"tensor {name} has no description")
    kind = info.get("dtype")
    if not isinstance(kind, str) or kind not in BITS:
        raise ValueError(f"tensor {name} has an unknown type")
    shape = _sizes(info.get("shape"))
    offsets = _sizes(info.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {name} has no valid shape and offsets")
    count = 1
    for length in shape:
        count *= length
        if count > MAX_NUMBERS:  # the product of the header's longest list would take hours
            raise ValueError(f"tensor {name} has more numbers than an address counts")
    begin, end = offsets
    if 8 * (end - begin) != count * BITS[kind]:
        raise ValueError(f"tensor {name} has {end - begin} bytes, which its type and shape do not take")
    return StoredTensor(DTYPES.get(kind, kind), shape, data_start + begin, end - begin)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """Return a header's list of sizes; None for anything else."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= MAX_NUMBERS for value in values):
        return None
    return tuple(values)


def serialized(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a file of host arrays by name. Larger numbers come first, so that all are aligned."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    parts: list[bytes] = []
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + array.nbytes
        header[name] = {"dtype": kinds[dtype_name(array)], "shape": list(array.shape), "data_offsets": [start, end]}
        parts.append(array.tobytes())
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *parts])
