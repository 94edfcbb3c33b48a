"""Entries are safetensors files that detect truncation and damage."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load

from tests.helpers.cache_folders import made_entry
from triforce.disk_cache.entry import DamagedEntry, Entry, Part, packed, unpacked

WHOLE = b"".join(packed(made_entry(size=96)))


def test_entry_comes_back_whole() -> None:
    entry = unpacked(bytearray(WHOLE))
    written_entry = made_entry(size=96)
    assert entry.facts == written_entry.facts and entry.parts["keys"].data == written_entry.parts["keys"].data
    assert (entry.parts["keys"].kind, entry.parts["keys"].shape) == ("U8", [96])


def test_entry_is_plain_safetensors() -> None:
    tensors = load(WHOLE)
    assert set(tensors) == {"keys", "checksum"}
    assert tensors["keys"].tobytes() == made_entry(size=96).parts["keys"].data


def test_flipped_bit_anywhere_is_found() -> None:
    for at in range(len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(DamagedEntry):
            unpacked(damaged)


def test_cut_anywhere_is_found() -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(DamagedEntry):
            unpacked(bytearray(WHOLE[:length]))


def entry_with_header(change: dict[str, object]) -> bytearray:
    """Return an entry with a changed header and a valid checksum."""
    from hashlib import blake2b

    size = int.from_bytes(WHOLE[:8], "little")
    placed = json.loads(WHOLE[8 : 8 + size]) | change
    text = json.dumps(placed).encode()
    body = len(text).to_bytes(8, "little") + text + WHOLE[8 + size : -32]
    return bytearray(body + blake2b(body, digest_size=32).digest())


@pytest.mark.parametrize(
    "change",
    [
        {"__metadata__": {"format": "of tomorrow"}},
        {"__metadata__": []},
        {"keys": {"dtype": "U8", "shape": [97], "data_offsets": [0, 96]}},
        {"keys": {"dtype": "F64", "shape": [12], "data_offsets": [0, 96]}},
        {"keys": {"dtype": "U8"}},
        {"keys": 7},
    ],
)
def test_wrong_header_is_found(change: dict[str, object]) -> None:
    unpacked(entry_with_header({}))
    with pytest.raises(DamagedEntry):
        unpacked(entry_with_header(change))


def test_entry_without_tensors_is_allowed() -> None:
    assert unpacked(bytearray(b"".join(packed(Entry({"a": "b"}, {}))))).facts == {"a": "b"}
    assert Entry({}, {"x": Part("F32", [2], memoryview(bytes(8)))}).bytes == 8
