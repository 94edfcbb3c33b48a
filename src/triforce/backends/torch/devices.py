"""Devices as torch sees them: which there are, which is current, their free memory, and host memory pinned for them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from numpy.typing import NDArray


def usable_device(name: str) -> str:
    """Return the name of a CUDA device that torch can use, with its index, which some functions of torch need.

    Raises RuntimeError or AssertionError, as torch does, if there is no such device.
    """
    device = torch.device(name)
    torch.empty(0, device=device).tolist()
    return f"cuda:{torch.cuda.current_device()}" if device.index is None else name


def make_current(device: str) -> AbstractContextManager[object]:
    """Return a context in which a CUDA device is this thread's current one."""
    context: AbstractContextManager[object] = torch.cuda.device(device)
    return context


def device_name(device: str) -> str:
    """Return the name of the GPU behind a CUDA device."""
    return str(torch.cuda.get_device_name(device))


def capability(device: str) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def free_bytes(device: str) -> int:
    """Return the bytes that this process may still take on a CUDA device, within its memory fraction if it has one."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return int(min(free + torch.cuda.memory_reserved(device) - used, share - used))


def release_unused_memory() -> None:
    """Give cached memory of all CUDA devices back."""
    torch.cuda.empty_cache()


def pin(memory: NDArray[Any], device: str) -> int:
    """Pin host memory for a CUDA device. Returns CUDA's error code, 0 on success.

    torch would pin only what it allocates itself, and rounds that up to a power of two.
    """
    with make_current(device):  # else CUDA would create a context on device 0
        return int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))


def unpin(address: int, device: str) -> None:
    """Unpin host memory at an address, once copies from and to it have ended."""
    torch.cuda.synchronize(device)
    with make_current(device):
        torch.cuda.cudart().cudaHostUnregister(address)
