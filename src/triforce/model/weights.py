"""Weights of a model: arrays on the host, or tensors on the device of a backend (see `triforce.arrays`).

Shape suffixes: V vocabulary, C hidden size, I MLP size, D head size, Q = query heads * D, P = KV heads * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import Array, DType, dtype_name
from triforce.errors import RequestError

NUMBER_TYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""GGUF types whose weights are single numbers, not blocks."""


def _no_release() -> None:
    """Release nothing: the bytes lie in no file."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Matrix of a GGUF type, for kernels that multiply with its packed form."""

    kind: str
    """GGUF type, such as Q4_K."""
    blocks: Array
    """uint8 (outputs, bytes of a row)"""
    inputs: int
    release: Callable[[], None] = _no_release
    """Function that drops the matrix's mapped file pages from memory. It is called after the matrix was packed."""

    narrow: ClassVar[bool] = True
    """Whether products take bfloat16 inputs; native code reads this field."""
    dtype: ClassVar[DType] = "bfloat16"
    """Type of the inputs of its products."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape as (outputs, inputs)."""
        return len(self.blocks), self.inputs

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def block(self) -> int:
        """Inputs of a block, which cannot be split."""
        return 1 if self.kind in NUMBER_TYPES else 256 if self.kind.endswith("_K") else 32

    def part(self, outputs: slice | NDArray[np.int64], inputs: slice = slice(None)) -> QuantizedWeight:
        """Return the submatrix of `outputs` and `inputs`. Raises RequestError unless the inputs are whole blocks."""
        start, stop, _ = inputs.indices(self.inputs)
        if start % self.block or stop % self.block:
            raise RequestError(
                f"weights of type {self.kind} are in blocks of {self.block} inputs, and a process's share of "
                f"{self.inputs} would be {start} to {stop}; leave out --tp-all-reduce, or take a file of other types"
            )
        size = self.blocks.shape[1]
        columns = slice(start * size // self.inputs, stop * size // self.inputs)
        return replace(self, blocks=np.ascontiguousarray(self.blocks[outputs, columns]), inputs=stop - start)


Matrix = Array | QuantizedWeight


def numbers(weight: Matrix | None) -> Array:
    """Return `weight` itself, typed as an array (M, K). Callers never pass a packed matrix."""
    assert weight is not None and not isinstance(weight, QuantizedWeight)
    return weight


def nbytes(weight: Matrix) -> int:
    """Return the bytes of a weight in memory or in its file."""
    size: int = weight.blocks.nbytes if isinstance(weight, QuantizedWeight) else weight.nbytes
    return size


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Projections of one expert."""

    gate_proj_IC: Matrix
    up_proj_IC: Matrix
    down_proj_CI: Matrix
    gate_bias_I: Array | None = None
    up_bias_I: Array | None = None
    down_bias_C: Array | None = None

    def weights(self) -> Iterator[Matrix]:
        """Every weight once, in a fixed order."""
        yield from (part for field in fields(self) if (part := getattr(self, field.name)) is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one decoder layer; `None` where the family has none.

    `q_norm_D` and `k_norm_D` are (D) for a norm of each head, and (Q) and (P) for a norm over all heads.
    """

    input_norm_C: Array | None
    q_proj_QC: Matrix
    k_proj_PC: Matrix
    v_proj_PC: Matrix
    o_proj_CQ: Matrix
    post_norm_C: Array | None
    """Norm of the MLP's input."""
    gate_proj_IC: Matrix | None
    up_proj_IC: Matrix | None
    down_proj_CI: Matrix | None
    q_bias_Q: Array | None = None
    k_bias_P: Array | None = None
    v_bias_P: Array | None = None
    q_norm_D: Array | None = None
    k_norm_D: Array | None = None
    attn_out_norm_C: Array | None = None
    mlp_out_norm_C: Array | None = None
    router_EC: Array | None = None
    """float32, with a row for each expert that the router chooses from; bias and correction of scores likewise."""
    router_bias_E: Array | None = None
    router_correction_E: Array | None = None
    o_bias_C: Array | None = None
    gate_bias_I: Array | None = None
    up_bias_I: Array | None = None
    down_bias_C: Array | None = None
    attention_sink_logits_H: Array | None = None
    """float32."""
    experts: tuple[Mlp, ...] = ()

    def weights(self) -> Iterator[Matrix]:
        """Every weight once, in a fixed order."""
        parts = [getattr(self, f.name) for f in fields(self) if f.name != "experts"]
        yield from (part for part in parts if part is not None)
        for expert in self.experts:
            yield from expert.weights()


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Matrices of one dtype; a tied head is the embedding itself."""

    embedding_VC: Matrix
    layers: tuple[Layer, ...]
    norm_C: Array
    head_VC: Matrix

    @property
    def dtype(self) -> DType:
        """Type of the embedding, and of the inputs of products."""
        return dtype_name(self.embedding_VC)

    @property
    def attention_sink_logits_LH(self) -> NDArray[np.float32] | None:
        """The sink logits of all layers, float32 (L, H), if the family has any."""
        logits_by_layer = [
            layer.attention_sink_logits_H for layer in self.layers if layer.attention_sink_logits_H is not None
        ]
        return np.stack(logits_by_layer) if logits_by_layer else None

    def tensors(self) -> Iterator[Matrix]:
        """Every weight once, in a fixed order."""
        yield self.embedding_VC
        for layer in self.layers:
            yield from layer.weights()
        yield self.norm_C
        if self.head_VC is not self.embedding_VC:
            yield self.head_VC

    def product_matrices(self) -> Iterator[Matrix]:
        """Every matrix of a matrix product, in layers and head, without routers, which are never packed."""
        yield self.head_VC
        for layer in self.layers:
            yield from (part for part in layer.weights() if len(part.shape) == 2 and part is not layer.router_EC)

    def int8_input_matrices(self) -> Iterator[Matrix]:
        """Every matrix whose products take int8 inputs by `ModelConfig.int8_inputs`: o, gate and up projections."""
        for layer in self.layers:
            yield layer.o_proj_CQ
            yield from (part for part in (layer.gate_proj_IC, layer.up_proj_IC) if part is not None)
            for expert in layer.experts:
                yield from (expert.gate_proj_IC, expert.up_proj_IC)

    @property
    def has_groups(self) -> bool:
        """Whether any product matrix has a scale for each group of inputs, as quantized GGUF types have."""
        return any(
            isinstance(weight, QuantizedWeight) and weight.kind not in NUMBER_TYPES
            for weight in self.product_matrices()
        )

    @property
    def has_numbers(self) -> bool:
        """Whether any product matrix holds unquantized numbers, which kernels can round to fewer bits."""
        return any(
            not isinstance(weight, QuantizedWeight) or weight.kind in NUMBER_TYPES for weight in self.product_matrices()
        )
