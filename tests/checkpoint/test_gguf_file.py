"""GGUF files: tensors are at the places and have the values that the format's library wrote.

Broken files raise one line.
"""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.helpers.gguf_files import write_gguf
from triforce.checkpoint.gguf.file import READABLE, GGUFFile
from triforce.errors import ModelError

VALUES: dict[str, Any] = {
    "a.text": "naïve 🙂", "a.number": 3, "a.float": 1e-5, "a.flag": True, "a.texts": ["one", "", "three"],
    "a.numbers": np.array([1, -2, 3], np.int32),
}  # fmt: skip
ROWS = np.linspace(-1, 1, 8 * 512, dtype=np.float32).reshape(8, 512)
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the types that the library can write
SMALL = {"one.weight": ROWS[:2, :64], "two.weight": ROWS[:1, :32]}


def refuses(file: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        GGUFFile(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_of_each_type_equal_those_written(tmp_path: Path, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", VALUES, {"w": (number, ROWS), "v": ROWS[0]}))
    tensor, raw = file.tensors["w"], file.raw("w")
    assert (tensor.type, tensor.shape, raw.shape) == (kind, (8, 512), (8, tensor.row_bytes))
    assert raw.tobytes() == gguf.quantize(ROWS, number).tobytes()
    assert not raw.flags.writeable
    assert file.tensors["v"].shape == (512,)
    assert file.raw("v").view(np.float32).tolist() == [ROWS[0].tolist()]


def test_metadata_equal_those_written(tmp_path: Path) -> None:
    metadata = GGUFFile(write_gguf(tmp_path / "x.gguf", VALUES, {})).metadata
    assert metadata["a.float"] == 1e-5  # not rounded to float32
    assert metadata["a.numbers"].tolist() == [1, -2, 3]
    assert {key: metadata[key] for key in VALUES if key != "a.numbers"} == {
        key: value for key, value in VALUES.items() if key != "a.numbers"
    }


def test_released_tensor_leaves_memory_and_comes_back(tmp_path: Path) -> None:
    rows = np.ones((4096, 2048), np.float32)  # 32 MiB
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", {}, {"w": rows}))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    raw = file.raw("w")
    assert raw.sum() > 0
    full = resident()
    file.release("w")
    assert full - resident() > rows.nbytes * 0.9
    assert (raw.view(np.float32) == 1).all()


@pytest.mark.parametrize("kind", sorted({kind.name for kind in GGMLQuantizationType} - set(READABLE)))
def test_types_without_computation_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "x.gguf", {}, {"blk.0.ffn_up.weight": ROWS})
    patch(file, description_place(file, b"blk.0.ffn_up.weight") + 20, struct.pack("<I", GGMLQuantizationType[kind]))
    refuses(file, f"tensor blk.0.ffn_up.weight has type {kind}, which cannot be computed .*download the Q4_K_M file")


def description_place(file: Path, name: bytes) -> int:
    """Return where the description of a tensor goes on after its name."""
    return file.read_bytes().index(name) + len(name)


def patch(file: Path, at: int, new: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + len(new)] = new
    file.write_bytes(data)


BROKEN: dict[str, tuple[int, bytes, str]] = {
    "magic": (0, b"GGML", "x.gguf is not a GGUF file"),
    "version 1": (4, struct.pack("<I", 1), "has version 1 of GGUF, and only 2 and 3 can be read"),
    "version 9": (4, struct.pack("<I", 9), "has version 9 of GGUF"),
    "other endian": (4, struct.pack(">I", 3), "big-endian"),
    "tensors": (8, struct.pack("<Q", 1 << 60), "announces 1152921504606846976 tensors"),
    "no more tensors": (8, struct.pack("<Q", 3), "is broken: .*download it again"),
    "entries": (16, struct.pack("<Q", 1 << 60), "announces 1152921504606846976 entries"),
    "key": (24, struct.pack("<Q", 1 << 40), "ends within a text of 1099511627776 bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_header_raises(tmp_path: Path, case: str) -> None:
    at, new, match = BROKEN[case]
    file = write_gguf(tmp_path / "x.gguf", VALUES, SMALL)
    patch(file, at, new)
    refuses(file, match)


PLACES: dict[str, tuple[int, bytes, str]] = {
    "dimensions": (0, struct.pack("<I", 5), "has 5 dimensions"),
    "no dimensions": (0, struct.pack("<I", 0), "has 0 dimensions"),
    "nothing": (4, struct.pack("<Q", 0), "has a dimension of 0"),
    "absurd": (4, struct.pack("<QQ", 1 << 62, 1 << 62), "ends .* bytes after the file"),
    "unknown type": (20, struct.pack("<I", 4), "has type number 4, which cannot be computed"),
    "no blocks": (4, struct.pack("<QQI", 65, 1, 8), "has rows of 65, which are no whole blocks of Q8_0"),
    "misaligned": (24, struct.pack("<Q", 4), "is not aligned to 32 bytes"),
    "past the end": (24, struct.pack("<Q", 1 << 40), "ends .* bytes after the file"),
    "overlap": (24, struct.pack("<Q", 512), "one.weight and two.weight overlap|ends"),
}


@pytest.mark.parametrize("case", PLACES)
def test_tensor_in_impossible_place_raises(tmp_path: Path, case: str) -> None:
    at, new, match = PLACES[case]
    file = write_gguf(tmp_path / "x.gguf", VALUES, SMALL)
    patch(file, description_place(file, b"one.weight") + at, new)
    refuses(file, match)


def test_overlapping_tensors_raise(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", {}, SMALL)
    patch(file, description_place(file, b"two.weight") + 24, struct.pack("<Q", 0))
    refuses(file, "tensors one.weight and two.weight overlap|tensors two.weight and one.weight overlap")


def test_names_that_stand_twice_raise(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", {"a.one": 1, "a.two": 2}, SMALL)
    patch(file, description_place(file, b"two.weight") - len("two.weight"), b"one")
    refuses(file, "two tensors called one.weight")
    patch(file, file.read_bytes().index(b"a.two"), b"a.one")
    refuses(file, "metadata has a.one twice")


@pytest.mark.parametrize("key", ["a" * 300, "a\nb"])
def test_names_that_no_message_can_show_raise(tmp_path: Path, key: str) -> None:
    refuses(write_gguf(tmp_path / "x.gguf", {key: 1}, {}), "it has 'a.* for a name")


def test_missing_or_cut_file_raises(tmp_path: Path) -> None:
    refuses(tmp_path / "none.gguf", "none.gguf cannot be read")
    (tmp_path / "empty.gguf").touch()
    refuses(tmp_path / "empty.gguf", "empty.gguf is empty; download it again")
    refuses(tmp_path, "cannot be read")
    data = write_gguf(tmp_path / "x.gguf", VALUES, SMALL).read_bytes()
    for length in (0, 3, 10, 30, len(data) // 2, len(data) - 65):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        refuses(tmp_path / "cut.gguf", "cut.gguf .*; download it again")


def split(folder: Path) -> list[Path]:
    write_gguf(folder / "m.gguf", VALUES, {f"w{i}": ROWS[i] for i in range(5)}, split_max_tensors=2)
    return sorted(folder.glob("m-*.gguf"))


def test_parts_are_found_from_any_of_them(tmp_path: Path) -> None:
    files = split(tmp_path)
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for file in files:
        opened = GGUFFile(file)
        assert opened.metadata["a.text"] == VALUES["a.text"]
        for i in range(5):
            assert opened.raw(f"w{i}").view(np.float32)[0].tolist() == ROWS[i].tolist()
            opened.release(f"w{i}")


def test_incomplete_or_mixed_parts_raise(tmp_path: Path) -> None:
    first_part, two, three = split(tmp_path)
    second_bytes = two.read_bytes()
    two.unlink()
    refuses(three, "m-00003-of-00003.gguf is one of 3 parts, and m-00002-of-00003.gguf is not beside it")
    two.write_bytes(first_part.read_bytes())
    refuses(first_part, "m-00002-of-00003.gguf calls itself part 1 of 3, and its name says 2 of 3")
    two.write_bytes(second_bytes)
    patch(first_part, first_part.read_bytes().index(b"split.tensors.count") + 19 + 4, struct.pack("<I", 9))
    refuses(first_part, "split.tensors.count = 9, but there are 5 tensors")
    (tmp_path / "alone.gguf").write_bytes(first_part.read_bytes())
    refuses(tmp_path / "alone.gguf", "calls itself part 1 of 3, and its name says 1 of 1")
    refuses(tmp_path / "m-00007-of-00003.gguf", "its name says part 7 of 3")
