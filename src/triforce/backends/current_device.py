"""The current CUDA device of a thread: Triton's launches, new streams and captures go there, wherever tensors lie.

Each thread begins with device 0, a server's engine thread too, so code that launches makes the tensors' device current.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is this thread's current CUDA device; an empty context for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def steps_on(device: torch.device, steps: Generator[T, None, None]) -> Generator[T, None, None]:
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
