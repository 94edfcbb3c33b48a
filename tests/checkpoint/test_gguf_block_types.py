"""Block types of GGUF tensors: sizes, and numbers of packed rows, as the format's own library has them.

Shape suffixes as in checkpoint/gguf/block_types.py.
"""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from triforce.checkpoint.gguf.block_types import BLOCK_TYPES, CHUNK, LAYOUTS, Bytes, block_type, unpacked_rows
from triforce.checkpoint.gguf.file import READABLE
from triforce.model.weights import NUMBER_TYPES

SPECIAL_HALVES = (
    0x0000, 0x8000,  # zeros
    0x0001, 0x8001, 0x03FF, 0x83FF,  # the least and the largest subnormal numbers
    0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF,  # the least normal number, ones, the largest numbers
    0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7D01,  # infinities, and quiet and signalling NaN
)  # fmt: skip
"""Bits of float16."""


def random_rows(kind: str, M: int, *, extreme: bool) -> Bytes:
    """Return rows of 4 blocks of random bytes, uint8 (M, X), with scales and minima of 0.01.

    extreme: scales and minima of any bits, and all pairs of `SPECIAL_HALVES`.
    """
    draw = np.random.default_rng(M)
    layout = LAYOUTS[kind]
    N = 4 * M
    blocks = draw.integers(0, 256, (N, layout.itemsize), np.uint8).view(layout)[:, 0]
    pairs_N2 = draw.integers(0, 1 << 16, (N, 2), np.uint16).view(np.float16)
    special_pairs = np.array(list(product(SPECIAL_HALVES, repeat=2)), np.uint16).view(np.float16)
    pairs_N2[: len(special_pairs)] = special_pairs[:N]
    if not extreme:
        pairs_N2 = (draw.standard_normal((N, 2)) * 0.01).astype(np.float16)
    for column, field in enumerate(("scale", "minimum")):
        if field in (layout.names or ()):
            blocks[field] = pairs_N2[:, column]
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(M, -1)


def library_numbers(kind: str, rows_MX: Bytes) -> NDArray[np.float32]:
    """Return the numbers by the format's library, float32 (M, K)."""
    with np.errstate(all="ignore"):
        numbers_MK: NDArray[np.float32] = quants.dequantize(rows_MX, GGMLQuantizationType[kind])
    return numbers_MK


def bits(numbers: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the bits of numbers, with the same bits for each NaN."""
    return np.where(np.isnan(numbers), np.float32(np.nan), numbers).view(np.uint32)


def assert_same_bits(kind: str, rows_MX: Bytes) -> None:
    """Compare numbers with those of the library, in shape, type and bits."""
    numbers_MK = unpacked_rows(kind, rows_MX)
    assert numbers_MK.dtype == np.float32
    np.testing.assert_array_equal(bits(numbers_MK), bits(library_numbers(kind, rows_MX)))


def test_table_equals_that_of_library() -> None:
    sizes = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert sizes == BLOCK_TYPES


def test_unknown_type_is_named_by_number() -> None:
    assert block_type(12).name == "Q4_K" and block_type(4) == ("number 4", 1, 1)


def test_layouts_are_those_of_readable_types() -> None:
    assert {*LAYOUTS, *NUMBER_TYPES} == set(READABLE)
    sizes = {kind.name: kind.size for kind in BLOCK_TYPES.values()}
    assert {kind: layout.itemsize for kind, layout in LAYOUTS.items()} == {kind: sizes[kind] for kind in LAYOUTS}


@pytest.mark.parametrize("extreme", [False, True], ids=["small scales", "any scales"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers_of_blocks_equal_those_of_library(kind: str, extreme: bool) -> None:
    """Weights are several chunks, and the last chunk is not full."""
    weights = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    rows_MX = random_rows(kind, 5 * CHUNK // (8 * weights) + 1, extreme=extreme)
    assert_same_bits(kind, rows_MX)
    if kind != "MXFP4":
        assert np.isnan(unpacked_rows(kind, rows_MX)).any() == extreme


def test_mxfp4_numbers_of_all_exponents_and_codes_equal_those_of_library() -> None:
    exponents_N = np.repeat(np.arange(256, dtype=np.uint8), 16)
    lower_nibbles_N = np.tile(np.arange(16, dtype=np.uint8), 256)
    rows_NX = np.repeat((lower_nibbles_N | (15 - lower_nibbles_N) << 4)[:, None], 17, axis=1)
    rows_NX[:, 0] = exponents_N
    assert_same_bits("MXFP4", rows_NX)


@pytest.mark.parametrize("kind", NUMBER_TYPES)
def test_numbers_without_blocks_equal_those_of_library(kind: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    upper_halves = halves.astype(np.uint32) << 16 | 1
    assert_same_bits(kind, (upper_halves if kind == "F32" else halves).view(np.uint8).reshape(16, -1))


@pytest.mark.parametrize("kind", READABLE)
def test_numbers_of_parts_of_files_equal_those_of_library(kind: str) -> None:
    """Rows at any address of memory that cannot be written, reordered rows, and one row."""
    rows_MX = random_rows(kind, 8, extreme=False) if kind in LAYOUTS else np.full((8, 64), 60, np.uint8)
    mapped_rows_MX = np.frombuffer(b"-" + rows_MX.tobytes(), np.uint8, rows_MX.size, 1).reshape(rows_MX.shape)
    numbers_MK = library_numbers(kind, rows_MX)
    order_M = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    np.testing.assert_array_equal(unpacked_rows(kind, mapped_rows_MX), numbers_MK)
    np.testing.assert_array_equal(unpacked_rows(kind, mapped_rows_MX[order_M]), numbers_MK[order_M])
    np.testing.assert_array_equal(unpacked_rows(kind, mapped_rows_MX[4:5]), numbers_MK[4:5])


def test_unpacked_rows_take_memory_of_their_numbers() -> None:
    rows_MX = np.zeros((1024, 16 * 176), np.uint8)
    tracemalloc.start()
    try:
        size = unpacked_rows("Q5_K", rows_MX).nbytes
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 16 << 20 and peak < size + 8 * CHUNK
