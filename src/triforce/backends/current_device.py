"""The current CUDA device of a thread: Triton's launches, new streams and captures go there, wherever tensors lie.

Each thread begins with device 0, a server's engine thread too, so whoever launches makes the tensors' device current.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one of this thread, for a while; nothing but a CUDA device can be."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def steps_on(device: torch.device, steps: Generator[T, None, None]) -> Generator[T, None, None]:
    """Take steps while a device is the current one; between two of them the caller's own is."""
    try:
        while True:
            with current(device):
                step = next(steps, None)
            if step is None:
                return
            yield step
    finally:
        with current(device):
            steps.close()
