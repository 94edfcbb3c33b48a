"""Rows of int8 KV: a token's key of one head, or its value, as codes followed by a scale in bfloat16.

A row is made once, by the pass that computes the token, and only copied afterwards. Shape suffix: R, D + 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import DType, float32
from triforce.model.config import SCALE_BYTES, ModelConfig

LARGEST_CODE = 127
"""Largest code; -128 is not used."""

STORED_TYPES: dict[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}
"""Names that safetensors files have for the types of KV."""


def kv_dtype(config: ModelConfig, dtype: DType) -> DType:
    """Return the type of the rows of a model that computes in `dtype`."""
    return "int8" if config.kv_int8 else dtype


def hadamard_size_of(config: ModelConfig) -> int:
    """Return the size of the Hadamard blocks that rotate a head's channels; 1 where heads are not rotated."""
    return hadamard_block(config.head_dim) if config.rotates_heads else 1


def hadamard_block(dim: int) -> int:
    """Return the size of Hadamard blocks: the largest power of two that divides a head's size."""
    return dim & -dim


def numbers(rows_R: NDArray[Any]) -> NDArray[np.float32]:
    """Return the numbers (..., D) of rows of any type on the host, float32 and exact."""
    if rows_R.dtype != np.int8:
        return float32(rows_R)
    scale = float32(np.ascontiguousarray(rows_R[..., -SCALE_BYTES:]).view(np.uint16))
    return rows_R[..., :-SCALE_BYTES].astype(np.float32) * scale
