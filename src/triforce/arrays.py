"""Arrays: numpy on the host, for native kernels; torch tensors where torch computes.

Code above the backends indexes arrays and passes them on. It never imports torch: `namespace` returns the functions of
the array API standard for the kind of an array. Backends with torch convert at their own door.

numpy has no bfloat16. On the host its bits stand for it: an array of uint16 holds bfloat16 numbers, in native code too.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
"""A numpy array, or a torch tensor from a backend that computes with torch."""

DType = str
"""Name of a type of weights, activations or KV: a key of `HOST_TYPES`."""

HOST_TYPES: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}
"""Type of a host array by name."""


def itemsize(dtype: DType) -> int:
    """Return the bytes of a number. The torch path computes with other types, too, such as float64."""
    return (HOST_TYPES.get(dtype) or np.dtype(dtype)).itemsize


def dtype_name(array: Array) -> DType:
    """Return the name of an array's type: bfloat16 for an array of its bits."""
    if isinstance(array, np.ndarray):
        return "bfloat16" if array.dtype == np.uint16 else str(array.dtype)
    return str(array.dtype).removeprefix("torch.")


def float32(host: NDArray[Any]) -> NDArray[np.float32]:
    """Return the numbers of a host array in float32: exact for bfloat16 and float16."""
    if host.dtype == np.uint16:
        return (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float32, copy=False)


def rounded(host: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return the numbers of a host array in another type, rounded to nearest, ties to even. NaN stays NaN."""
    if dtype_name(host) == dtype:
        return host
    numbers = float32(host)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # beyond the range of float16: infinite, as in torch
            return numbers.astype(HOST_TYPES[dtype])
    bits = numbers.view(np.uint32)
    upper_bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), upper_bits)


def cast(array: Array, dtype: DType) -> Array:
    """Return the numbers of an array of any kind in another type, in the same shape."""
    return rounded(array, dtype) if isinstance(array, np.ndarray) else array.to(getattr(_torch(), dtype))


def namespace(array: Array) -> Any:
    """Return the namespace of the array API standard for an array: numpy, or that of torch."""
    if isinstance(array, np.ndarray):
        return np
    from array_api_compat import array_namespace  # part of the extra that brings torch

    return array_namespace(array)


def on_device_of(source: Array, array: Array) -> Array:
    """Return `source`, in its shape, as an array of the kind of `array` on its device. It may be a host array."""
    return source if isinstance(array, np.ndarray) else on_device(source, array.device)


def on_device(source: Array, device: object) -> Array:
    """Return a host array, or a tensor, as a tensor of equal shape on a device; bits of bfloat16 become bfloat16.

    A copy does not wait for the device's queued work.
    """
    if not isinstance(source, np.ndarray):
        return source.to(device)
    writeable = source if source.flags.writeable else source.copy()  # torch warns of a view of read-only memory
    if source.dtype == np.uint16:
        return _torch().from_numpy(writeable.view(np.int16)).view(_torch().bfloat16).to(device, non_blocking=True)
    return _torch().from_numpy(writeable).to(device, non_blocking=True)


def to_host(array: Array) -> NDArray[Any]:
    """Return an array on the host: of a tensor on the CPU a view of the same memory."""
    if isinstance(array, np.ndarray):
        return array
    tensor = array.detach().cpu()
    if tensor.dtype == _torch().bfloat16:
        return np.asarray(tensor.contiguous().view(_torch().int16).numpy()).view(np.uint16)
    return np.asarray(tensor.numpy())


def _torch() -> Any:
    """Return torch, which is imported wherever there are tensors."""
    return sys.modules["torch"]


def is_gpu(device: str) -> bool:
    """Return whether a device is a CUDA device, such as `cuda:0`; the other one is `cpu`."""
    return device.startswith("cuda")
