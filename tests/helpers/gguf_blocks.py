"""Random weights in blocks of GGUF types, and their float64 values.

Shape suffixes: M outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray
from torch import Tensor

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
NUMBERS = ("F32", "F16", "BF16")
"""Types without blocks: each weight is a number by itself."""
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Byte offsets of a block's scale and minimum. Other types have a scale at the beginning."""


@dataclass
class Blocks:
    """A weight as a reader of GGUF files passes it to the kernels."""

    kind: str
    blocks: Tensor
    """uint8 (M, bytes of K inputs)"""
    narrow: bool = False

    def weights_MK(self) -> Tensor:
        """Return the weights by the format's library, float64 (M, K)."""
        return torch.from_numpy(quants.dequantize(self.blocks.numpy(), GGMLQuantizationType[self.kind])).double()


def as_bytes(numbers: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Return a file's rows of numbers (M, K) in a type."""
    return quants.quantize(numbers, GGMLQuantizationType[kind]).view(np.uint8)


def inputs_of_block(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def random_blocks(kind: str, M: int, K: int, narrow: bool = False, seed: int = 0, size: float = 0.01) -> Blocks:
    """Return blocks of all codes and small scales, with float16 values of `size` and both signs; one output is zero.

    Types without blocks get numbers of `size`, too.
    """
    draw = np.random.default_rng(seed)
    if kind in NUMBERS:
        numbers = (draw.standard_normal((M, K)) * size).astype(np.float32)
        numbers[M // 2] = 0
        return Blocks(kind, torch.from_numpy(as_bytes(numbers, kind)), narrow)
    inputs, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    block_bytes = draw.integers(0, 256, (M, K // inputs, width), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = (draw.standard_normal(block_bytes.shape[:2]) * size).astype(np.float16)
        halves[M // 2] = 0
        block_bytes[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    return Blocks(kind, torch.from_numpy(block_bytes.reshape(M, -1)), narrow)
