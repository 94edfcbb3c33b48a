"""The door between host arrays and tensors: the same memory, the same bits, and numbers rounded as in torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import array_api_compat.torch
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.test_arrays import UPPER_HALVES, floats
from triforce.arrays import cast, dtype_name, float32, itemsize, namespace, on_device, on_device_of, rounded, to_host
from triforce.backends.torch.tensors import as_tensor, tensor_of, torch_dtype

TYPES = ["float32", "bfloat16", "float16", "int8"]


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """torch warns of a view of a read-only array, as writes to it are undefined."""
    with warnings.catch_warnings(action="error"):
        yield


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def equal_but_for_nan(array: NDArray[Any], tensor: torch.Tensor) -> bool:
    """Whether an array has the bits of a tensor, and NaN where the tensor has NaN."""
    numbers = tensor.float().numpy()
    is_nan = np.isnan(numbers)
    expected = to_host(tensor)
    return (
        array.dtype == expected.dtype
        and np.array_equal(np.isnan(float32(array)), is_nan)
        and np.array_equal(bits(array)[~is_nan], bits(expected)[~is_nan])
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_are_rounded_as_in_torch(dtype: str) -> None:
    """All upper halves of float32 numbers, with lower halves at and beside ties."""
    numbers = floats()
    assert equal_but_for_nan(rounded(numbers, dtype), torch.from_numpy(numbers).to(torch_dtype(dtype)))


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_short_numbers_are_rounded_as_in_torch(source: str, dtype: str) -> None:
    tensor = torch.from_numpy(UPPER_HALVES.astype(np.uint16).view(np.int16)).view(torch_dtype(source))
    assert equal_but_for_nan(rounded(to_host(tensor), dtype), tensor.to(torch_dtype(dtype)))
    assert equal_but_for_nan(float32(to_host(tensor)), tensor.float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_long_numbers_are_rounded_as_in_torch(dtype: str) -> None:
    """float64 is rounded to float32 first, in torch too."""
    numbers = np.random.default_rng(0).standard_normal(100_000) * 2.0 ** np.random.default_rng(1).integers(-30, 20)
    numbers[:3] = 1 + 2.0**-8 + 2.0**-40, np.nan, -np.inf
    assert equal_but_for_nan(rounded(numbers, dtype), torch.from_numpy(numbers).to(torch_dtype(dtype)))


@pytest.mark.parametrize("dtype", TYPES)
def test_views_share_memory(dtype: str) -> None:
    tensor = torch.arange(24).view(2, 3, 4).to(torch_dtype(dtype))
    array = to_host(tensor)
    assert dtype_name(array) == dtype_name(tensor) == dtype and array.itemsize == tensor.itemsize == itemsize(dtype)
    assert array.shape == tensor.shape and array.ctypes.data == tensor.data_ptr()
    tensor[1, 2, 3] = 99
    assert cast(array, "float32")[1, 2, 3] == 99
    for view in (tensor_of(array), as_tensor(array)):
        assert view.dtype == tensor.dtype and view.data_ptr() == tensor.data_ptr() and torch.equal(view, tensor)
    assert as_tensor(tensor) is tensor


@pytest.mark.parametrize("dtype", TYPES)
def test_strided_tensors_keep_their_numbers(dtype: str) -> None:
    tensor = torch.arange(24).view(2, 3, 4).to(torch_dtype(dtype)).transpose(0, 2)[:, ::2]
    array = to_host(tensor)
    assert array.shape == tensor.shape == (4, 2, 2)
    assert np.array_equal(cast(array, "float32"), tensor.float().numpy())
    assert torch.equal(tensor_of(array), tensor)


def test_bfloat16_bits_survive_both_ways() -> None:
    array = UPPER_HALVES.astype(np.uint16)
    tensor = tensor_of(array)
    assert tensor.dtype == torch.bfloat16
    assert np.array_equal(to_host(tensor), array)
    assert np.array_equal(tensor.float().view(torch.int32).numpy().view(np.uint32), UPPER_HALVES << 16)


@pytest.mark.parametrize("dtype", TYPES)
def test_read_only_arrays_become_views_without_a_warning(dtype: str) -> None:
    array = rounded(np.arange(6, dtype=np.float32), dtype)
    array.flags.writeable = False
    tensor = tensor_of(array)
    assert tensor.data_ptr() == array.ctypes.data and tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_gradients_stay_behind() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert to_host(tensor).tolist() == [1, 1, 1]
    assert to_host((tensor * 2).bfloat16()).tolist() == [0x4000] * 3


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.bool_, np.float64])
def test_numbers_for_a_device_keep_their_type(kind: type) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(kind)
    tensor = on_device(array, "cpu")
    assert str(tensor.dtype) == f"torch.{array.dtype}" and tensor.tolist() == array.tolist()
    assert on_device(tensor, "cpu") is tensor
    assert torch.equal(on_device_of(array, torch.zeros(1)), tensor)
    assert on_device_of(array, np.zeros(1)) is array


def test_read_only_numbers_for_a_device_are_copied() -> None:
    """Cached index arrays are read-only, and a tensor may be written to."""
    array = np.arange(3)
    assert on_device(array, "cpu").data_ptr() == array.ctypes.data
    array.flags.writeable = False
    tensor = on_device(array, "cpu")
    tensor[0] = 7
    assert array.tolist() == [0, 1, 2]


def test_tensors_have_torchs_namespace() -> None:
    assert namespace(torch.zeros(1)) is array_api_compat.torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_cast_by_torch(dtype: str) -> None:
    tensor = torch.tensor([1.1, -2.7])
    assert torch.equal(cast(tensor, dtype), tensor.to(torch_dtype(dtype)))
    assert np.array_equal(bits(cast(tensor.numpy(), dtype)), bits(to_host(tensor.to(torch_dtype(dtype)))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_cross_to_a_gpu_and_back(dtype: str) -> None:
    array = rounded(np.arange(6, dtype=np.float32), dtype)
    for tensor in (tensor_of(array, "cuda"), tensor_of(array).cuda()):
        assert tensor.is_cuda and tensor.dtype == torch_dtype(dtype)
        assert np.array_equal(bits(to_host(tensor)), bits(array))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_tensor_of_no_numbers_can_be_viewed_as_other_numbers(dtype: Any) -> None:
    assert tensor_of(np.empty(0, dtype)).view(torch.uint8).view(torch.float32).shape == (0,)
