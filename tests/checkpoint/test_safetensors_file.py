"""Safetensors as Hugging Face's library reads and writes them: the same files are refused, and arrays have its bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from copy import deepcopy
from mmap import ACCESS_READ, mmap
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.helpers.fuzz_kinds.safetensors_header import spoil, spoil_bytes
from tests.helpers.safetensors_bytes import parts, write
from triforce.arrays import to_host
from triforce.checkpoint.safetensors_file import BITS, DTYPES, MAX_HEADER_BYTES, serialized, stored_tensors
from triforce.checkpoint.weight_files import Safetensors
from triforce.errors import ModelError

TENSORS = {
    "BF16": torch.randn(3, 5).bfloat16(), "F32": torch.randn(7), "F16": torch.randn(2, 1, 2).half(),
    "F64": torch.randn(4, 4, dtype=torch.float64), "I64": torch.arange(3), "I32": torch.arange(5, dtype=torch.int32),
    "I16": torch.arange(5, dtype=torch.int16), "I8": torch.arange(-3, 4, dtype=torch.int8),
    "U8": torch.arange(9).byte(), "BOOL": torch.tensor([True, False, True]), "empty": torch.empty(0, 4),
    "one number": torch.tensor(1.5),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def arrays_of(file: Path) -> dict[str, NDArray[Any]]:
    archive = Safetensors(file)
    return {name: archive.view(name) for name in archive.names()}


def test_arrays_are_tensors_of_the_library(file: Path) -> None:
    arrays = arrays_of(file)
    archive = Safetensors(file)
    for name, tensor in load_file(file).items():
        assert archive.dtype(name) == str(tensor.dtype).removeprefix("torch.")
        assert archive.shape(name) == arrays[name].shape == tuple(tensor.shape)
        assert arrays[name].dtype == to_host(tensor).dtype and np.array_equal(arrays[name], to_host(tensor))
        assert np.array_equal(archive.transient_view(name), arrays[name]) and not arrays[name].flags.writeable
    assert len(arrays) == len(TENSORS)


def accepted_by_library(file: Path) -> set[str] | None:
    """Return the names of a file's tensors; None for a file that the library refuses."""
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            return set(opened.keys())
    except (safetensors.SafetensorError, OSError, ValueError):
        return None


def accepted(file: Path) -> set[str] | None:
    try:
        return set(Safetensors(file).names())
    except ModelError as error:
        assert "model.safetensors is corrupt, truncated or a Git LFS pointer (" in str(error)
        assert str(error).endswith("); download it again")
        return None


def spoiled_headers(header: Any, data: bytes) -> Iterator[tuple[str, Any, bytes]]:
    """Yield faults, and forms that have none: their name, header and data."""
    first, second = sorted((name for name in header if name != "__metadata__"),
                           key=lambda name: header[name]["data_offsets"])[-2:]  # fmt: skip
    size = len(data)

    def changed(name: str, **entry: Any) -> Any:
        return header | {name: header[name] | entry}

    yield "as it is", header, data
    yield "another order", dict(reversed(header.items())), data
    yield "an unknown field", changed(first, more=1), data
    yield "no metadata", {name: entry for name, entry in header.items() if name != "__metadata__"}, data
    yield "metadata of null", header | {"__metadata__": None}, data
    yield "metadata of numbers", header | {"__metadata__": {"a": 1}}, data
    yield "metadata of a text", header | {"__metadata__": "a"}, data
    yield "bytes behind", header, data + b"\0"
    yield "bytes missing", header, data[:-1]
    yield "a gap", {name: entry for name, entry in header.items() if name != first}, data
    yield "an overlap", changed(second, data_offsets=header[first]["data_offsets"]), data
    yield "a shape of fewer numbers", changed(first, shape=[1]), data
    yield "a shape that overflows", changed(first, shape=[1 << 32, 1 << 32, 1 << 32]), data
    yield "a shape that overflows before its zero", changed("empty", shape=[1 << 33, 1 << 33, 0]), data
    yield "a shape of a zero first", changed("empty", shape=[0, 1 << 33, 1 << 33]), data
    yield "a negative shape", changed("empty", shape=[-1, 0]), data
    yield "a shape of true", changed("one number", shape=[True]), data
    yield "a shape of fractions", changed("one number", shape=[1.0]), data
    yield "a shape of a unit", changed("one number", shape=[1]), data
    yield "offsets beyond", changed(first, data_offsets=[size, size + 4]), data
    yield "offsets of one", changed(first, data_offsets=[0]), data
    yield "offsets in reverse", changed("empty", data_offsets=header["empty"]["data_offsets"][::-1]), data
    yield "an unknown type", changed(first, dtype="F128"), data
    yield "a type in lower case", changed(first, dtype="f32"), data
    yield "no type", header | {first: {key: part for key, part in header[first].items() if key != "dtype"}}, data
    yield "half a byte", header | {"odd": {"dtype": "F4", "shape": [1], "data_offsets": [size, size]}}, data
    yield (
        "two halves of a byte",
        header | {"even": {"dtype": "F4", "shape": [2], "data_offsets": [size, size + 1]}},
        data + b"\0",
    )
    yield "a tensor that is a list", header | {"list": []}, data
    for kind in BITS:
        entry = {"dtype": kind, "shape": [8], "data_offsets": [size, size + BITS[kind]]}
        yield f"a tensor of {kind}", header | {"more": entry}, data + bytes(BITS[kind])


def test_headers_are_refused_where_the_library_refuses_them(file: Path) -> None:
    outcomes = {}
    for name, header, data in spoiled_headers(*parts(file)):
        write(file, header, data)
        outcomes[name] = accepted(file), accepted_by_library(file)
    assert not {name: outcome for name, outcome in outcomes.items() if outcome[0] != outcome[1]}
    assert sum(own_result is None for own_result, _ in outcomes.values()) > 18


def test_random_faults_are_refused_where_the_library_refuses_them(file: Path) -> None:
    random = Random(0)
    whole_header, whole_data = parts(file)
    refused = 0
    for _ in range(1000):
        header = deepcopy(whole_header)
        for _ in range(random.choice([1, 1, 2])):
            spoil(random, header, len(whole_data))
        write(file, header, whole_data)
        if random.random() < 0.3:
            spoil_bytes(random, file)
        own_result = accepted(file)
        assert own_result == accepted_by_library(file), header
        refused += own_result is None
    assert 300 < refused < 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 1}', "has a name twice"),
        (b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', "has a name twice"),
        (b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', "surrogates not allowed"),
        (b"[]", "its header is no object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"\xff{}", "invalid start byte"),
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
    ],
)
def test_headers_that_are_no_objects_are_refused(text: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ModelError, match=rf"is corrupt, .*{reason}.*download it again"):
        Safetensors(file)


def test_header_beyond_its_limit_is_not_parsed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}")
    with pytest.raises(ModelError, match="is to have 100000001 bytes, more than 100000000"):
        Safetensors(file)


def test_shape_of_many_sizes_is_refused_at_once(tmp_path: Path) -> None:
    """The product of all sizes would take minutes."""
    file = tmp_path / "model.safetensors"
    sizes = ",".join(["9223372036854775807"] * 1_000_000)
    text = f'{{"a": {{"dtype": "U8", "shape": [{sizes}], "data_offsets": [0, 0]}}}}'.encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ModelError, match="more numbers than an address counts"):
        Safetensors(file)


@pytest.mark.parametrize("kind", sorted(BITS.keys() - DTYPES.keys()))
def test_types_without_arrays_have_a_name_and_no_view(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": {"dtype": kind, "shape": [8], "data_offsets": [0, BITS[kind]]}},
          bytes(BITS[kind]))  # fmt: skip
    archive = Safetensors(tmp_path / "x.safetensors")
    assert archive.dtype("a") == kind and archive.shape("a") == (8,)
    with pytest.raises(ModelError, match=f"tensor a cannot be read .its type, {kind}, has no arrays"):
        archive.view("a")


def test_numbers_off_their_alignment_are_copied(tmp_path: Path) -> None:
    """The header has any length, and bytes may stand before wider numbers."""
    numbers = np.arange(5, dtype=np.float32)
    header = {"byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "numbers": {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]}}  # fmt: skip
    for padding in range(4):
        write(tmp_path / "x.safetensors", header | {"__metadata__": {"a": "x" * padding}}, b"\0" + numbers.tobytes())
        view = Safetensors(tmp_path / "x.safetensors").view("numbers")
        assert np.array_equal(view, numbers) and view.flags.aligned


def test_written_file_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 2).bfloat16(), "a ü": torch.randn(4).bfloat16(), "d2t": torch.arange(3),
        "t2d": torch.tensor([True, False]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "theirs.safetensors")
    own_result = serialized({name: to_host(tensor) for name, tensor in tensors.items()})
    assert own_result == (tmp_path / "theirs.safetensors").read_bytes()


def test_all_types_are_written_and_read_back(file: Path, tmp_path: Path) -> None:
    arrays = arrays_of(file)
    (tmp_path / "again.safetensors").write_bytes(serialized(arrays))
    again = arrays_of(tmp_path / "again.safetensors")
    assert again.keys() == arrays.keys()
    assert all(
        np.array_equal(again[name], array) and again[name].dtype == array.dtype for name, array in arrays.items()
    )
    assert accepted_by_library(tmp_path / "again.safetensors") == arrays.keys()


def test_file_that_was_cut_since_it_was_opened_is_told(file: Path) -> None:
    archive = Safetensors(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"model.safetensors: tensor F64 cannot be read \(.*\)"):
        archive.transient_view("F64")


def test_places_are_those_of_the_header(file: Path) -> None:
    header, data = parts(file)
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as mapped:
        start = len(mapped) - len(data)
        own_offsets = {name: [tensor.start - start, tensor.start + tensor.size - start]
                 for name, tensor in stored_tensors(mapped).items()}  # fmt: skip
    assert own_offsets == {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}


def resident(file: Path) -> int:
    """Return the bytes of a file's mappings that are in this process's memory."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs Linux")
    total = 0
    inside = False
    for line in smaps.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and first == "Rss:":
            total += int(rest[0]) << 10
    return total


def test_pages_of_transient_views_leave_memory_with_them(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, file)
    archive = Safetensors(file)
    assert archive.transient_view("a").sum() == 1 << 20
    assert resident(file) < 1 << 20
    view = archive.view("a")
    assert view.sum() == 1 << 20 and resident(file) >= 4 << 20
