"""Triton kernels: a function over tensors for each job, with its jitted parts above it.

They run on CUDA devices, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1), which is for tests: it is exact and
slow. Imported only where `backends/dispatch.py` has found Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NAMES = {"torch.float32": tl.float32, "torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16}


def interpreted() -> bool:
    """Whether kernels run in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


def on_amd() -> bool:
    """Whether torch was built for AMD's GPUs."""
    return torch.version.hip is not None


def on_nvidia() -> bool:
    """Whether kernels are compiled for NVIDIA's GPUs, and may have their instructions in them."""
    return not interpreted() and not on_amd()


def multiplied_as(x: Tensor, coded: bool = False) -> tl.dtype:
    """The type in which matrices of this one meet: the interpreter knows no products of bfloat16.

    coded: with codes, whose weights are of all sizes: float16 has no small ones.
    """
    if interpreted():
        return tl.float32
    return tl.bfloat16 if coded and x.itemsize == 2 else NAMES[str(x.dtype)]
