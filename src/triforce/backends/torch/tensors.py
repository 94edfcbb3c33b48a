"""Tensors from host arrays (see `triforce.arrays`)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triforce.arrays import Array, DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's type of a name."""
    named: torch.dtype = getattr(torch, dtype)
    return named


def tensor_of(host: NDArray[Any], device: torch.device | str = "cpu") -> Tensor:
    """Return a host array as a tensor of equal shape: on the CPU a view of its memory, which is not to be written to.

    An array of bfloat16 bits becomes a bfloat16 tensor.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the array may be read-only
        tensor = torch.from_numpy(host.view(np.int16) if host.dtype == np.uint16 else host)
    if not host.size:  # torch gives it strides of 0, and then other types of numbers cannot view it
        tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return (tensor.view(torch.bfloat16) if host.dtype == np.uint16 else tensor).to(device)


def as_tensor(array: Array) -> Tensor:
    """Return a tensor as it is, and a host array as a tensor of equal shape that shares its memory."""
    return array if isinstance(array, Tensor) else tensor_of(array)
