"""Host arrays: numbers of each type, and rounding, against a search for the nearest number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, cast, dtype_name, float32, is_gpu, itemsize, namespace, rounded, to_host

UPPER_HALVES = np.arange(1 << 16, dtype=np.uint32)
LOWER_HALVES = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
"""Lower halves at a bfloat16 number, and right beside and at the middle between two."""


def floats() -> NDArray[np.float32]:
    """Return all upper halves with these lower halves: (65536, 6), subnormal numbers, infinities and NaN among them."""
    return (UPPER_HALVES[:, None] << 16 | LOWER_HALVES).view(np.float32)


def nearest(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest bfloat16 numbers of finite numbers by their distances in float64; of two the even one."""
    below = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    above = below + np.uint16(1)
    exact = numbers.astype(np.float64)
    # Where infinity is the number above, the next number of an unbounded exponent stands for it.
    beyond = np.where(above & 0x7FFF == 0x7F80, np.copysign(2.0**128, exact), float32(above).astype(np.float64))
    distance_below, distance_above = abs(float32(below).astype(np.float64) - exact), abs(beyond - exact)
    is_above = (distance_above < distance_below) | ((distance_above == distance_below) & (below % 2 == 1))
    return np.where(is_above, above, below)


def test_rounding_to_bfloat16_takes_the_nearest_number() -> None:
    numbers = floats()
    bits = rounded(numbers, "bfloat16")
    finite = np.isfinite(numbers)
    assert bits.dtype == np.uint16 and np.array_equal(bits[finite], nearest(numbers[finite]))
    assert np.array_equal(float32(bits)[np.isinf(numbers)], numbers[np.isinf(numbers)])
    assert (bits[np.isnan(numbers)] == 0x7FC0).all()


def test_rounding_breaks_ties_to_even() -> None:
    numbers = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 2.0**-134, 3 * 2.0**-134, 3.4e38, -0.0], np.float32)
    expected = [0x3F80, 0x3F82, 0xBF80, 0x0000, 0x0002, 0x7F80, 0x8000]
    assert rounded(numbers, "bfloat16").tolist() == expected


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_rounding_keeps_shapes_and_reads_strided_arrays(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for dtype in ("bfloat16", "float16", "float32"):
        expected = [int(rounded(np.array([x], np.float32), dtype).view(f"u{itemsize(dtype)}")[0]) for x in numbers.flat]
        for array in (numbers, *([np.repeat(numbers, 2, -1)[..., ::2], np.asfortranarray(numbers)] if shape else [])):
            result = rounded(array, dtype)
            assert result.shape == shape and result.dtype == HOST_TYPES[dtype]
            assert result.copy("C").view(f"u{itemsize(dtype)}").flatten().tolist() == expected


@pytest.mark.parametrize("dtype", HOST_TYPES)
def test_arrays_of_the_type_asked_for_are_not_copied(dtype: str) -> None:
    array = np.zeros(3, HOST_TYPES[dtype])
    assert dtype_name(array) == dtype and itemsize(dtype) == array.itemsize
    assert rounded(array, dtype) is array and cast(array, dtype) is array and to_host(array) is array
    assert namespace(array) is np


def test_float32_is_exact() -> None:
    bits = UPPER_HALVES.astype(np.uint16)
    assert np.array_equal(float32(bits).view(np.uint32), UPPER_HALVES << 16)
    halves = bits.view(np.float16)
    with np.errstate(invalid="ignore"):  # casts of signaling NaN
        assert np.array_equal(float32(halves).astype(np.float64), halves.astype(np.float64), equal_nan=True)
    numbers = floats()
    assert float32(numbers) is numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_of_16_bits_survive_float32(dtype: str) -> None:
    array: NDArray[Any] = UPPER_HALVES.astype(np.uint16).view(HOST_TYPES[dtype])
    numbers = float32(array)
    is_number = ~np.isnan(numbers)
    assert np.array_equal(rounded(numbers, dtype).view(np.uint16)[is_number], array.view(np.uint16)[is_number])
    assert np.isnan(float32(rounded(numbers, dtype))[~is_number]).all()


def test_gpus_are_told_by_name() -> None:
    assert not is_gpu("cpu") and is_gpu("cuda") and is_gpu("cuda:1")
