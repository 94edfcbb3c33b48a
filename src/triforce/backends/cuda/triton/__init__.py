"""Triton kernels: a function over tensors for each operation, and its jitted parts.

Kernels run on CUDA devices, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1), which is for tests: it is exact
and slow. Imported only where `backends/dispatch.py` has found Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TRITON_TYPES = {"torch.float32": tl.float32, "torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16}


def interpreted() -> bool:
    """Return whether kernels run in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


def on_amd() -> bool:
    """Return whether torch was built for AMD's GPUs."""
    return torch.version.hip is not None


def on_nvidia() -> bool:
    """Return whether kernels are compiled for NVIDIA's GPUs, and may contain PTX."""
    return not interpreted() and not on_amd()


def multiplied_as(x: Tensor, coded: bool = False) -> tl.dtype:
    """Return the Triton type of the factors of a product with `x`.

    The type is that of `x`, and float32 in the interpreter, which lacks bfloat16. coded: whether the product is with
    int8 KV; attention weights times value scales may then be too small for float16, so 16-bit types become bfloat16.
    """
    if interpreted():
        return tl.float32
    return tl.bfloat16 if coded and x.itemsize == 2 else TRITON_TYPES[str(x.dtype)]
