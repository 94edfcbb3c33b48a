"""The current CUDA device of a thread: Triton's launches, new streams and captures go there, wherever tensors lie.

Each thread begins with device 0, a server's engine thread too. So code that launches kernels first makes the tensors'
device current.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from triforce.arrays import is_gpu

T = TypeVar("T")


def device_context(device: str) -> AbstractContextManager[object]:
    """Return a context in which `device` is this thread's current CUDA device; an empty context for a CPU."""
    if not is_gpu(device):
        return nullcontext()
    from triforce.backends.torch.devices import make_current

    return make_current(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device ran out of memory. Such an error can only come from torch, which then is imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def steps_on(device: str, steps: Generator[T, None, None]) -> Generator[T, None, None]:
    """Run the steps of a generator with `device` current; between two steps the caller's device is current."""
    try:
        while True:
            with device_context(device):
                step = next(steps, None)
            if step is None:
                return
            yield step
    finally:
        with device_context(device):
            steps.close()
