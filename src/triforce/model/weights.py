"""Weights of a model, as plain tensors.

Shape suffixes: V vocabulary, C hidden size, I MLP size, D head size, Q = query heads * D, P = KV heads * D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from triforce.errors import RequestError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGUF types whose weights are single numbers, not blocks."""


def _no_release() -> None:
    """Release nothing: the bytes lie in no file."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Matrix of a GGUF type, for kernels that multiply with its packed form."""

    kind: str
    """GGUF type, such as Q4_K."""
    blocks: Tensor
    """uint8 (outputs, bytes of a row)"""
    inputs: int
    release: Callable[[], None] = _no_release
    """Function that lets the file's pages of this matrix leave memory, for use after it was packed."""

    narrow = True
    dtype = torch.bfloat16
    """Type of the inputs of its products."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape as (outputs, inputs)."""
        return len(self.blocks), self.inputs

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def block(self) -> int:
        """Inputs of a block, which cannot be split."""
        return 1 if self.kind in PLAIN else 256 if self.kind.endswith("_K") else 32

    def part(self, outputs: slice | Tensor, inputs: slice = slice(None)) -> QuantizedWeight:
        """Return the submatrix of `outputs` and `inputs`. Raises RequestError where the inputs are no whole blocks."""
        start, stop, _ = inputs.indices(self.inputs)
        if start % self.block or stop % self.block:
            raise RequestError(
                f"weights of type {self.kind} are in blocks of {self.block} inputs, and a process's share of "
                f"{self.inputs} would be {start} to {stop}; leave out --tp-all-reduce, or take a file of other types"
            )
        size = self.blocks.shape[1]
        columns = slice(start * size // self.inputs, stop * size // self.inputs)
        return replace(self, blocks=self.blocks[outputs, columns].contiguous(), inputs=stop - start)


Matrix = Tensor | QuantizedWeight


def numbers(weight: Matrix | None) -> Tensor:
    """Return a matrix of numbers, (M, K), as it is: code that computes with numbers never gets packed weights."""
    assert isinstance(weight, Tensor)
    return weight


def nbytes(weight: Matrix) -> int:
    """Return the bytes of a weight in memory or in its file."""
    return weight.nbytes if isinstance(weight, Tensor) else weight.blocks.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Projections of one expert."""

    gate_proj_IC: Matrix
    up_proj_IC: Matrix
    down_proj_CI: Matrix
    gate_bias_I: Tensor | None = None
    up_bias_I: Tensor | None = None
    down_bias_C: Tensor | None = None

    def weights(self) -> Iterator[Matrix]:
        """Every weight once, in a fixed order."""
        yield from (part for field in fields(self) if (part := getattr(self, field.name)) is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one decoder layer; `None` where the family has none.

    Norms of queries and keys are of each head (D), or of all heads at once, (Q) and (P).
    """

    input_norm_C: Tensor | None
    q_proj_QC: Matrix
    k_proj_PC: Matrix
    v_proj_PC: Matrix
    o_proj_CQ: Matrix
    post_norm_C: Tensor | None
    """Norm of the MLP's input."""
    gate_proj_IC: Matrix | None
    up_proj_IC: Matrix | None
    down_proj_CI: Matrix | None
    q_bias_Q: Tensor | None = None
    k_bias_P: Tensor | None = None
    v_bias_P: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    attn_out_norm_C: Tensor | None = None
    mlp_out_norm_C: Tensor | None = None
    router_EC: Tensor | None = None
    """float32, with a row for each expert that the router chooses from; bias and correction of scores likewise."""
    router_bias_E: Tensor | None = None
    router_correction_E: Tensor | None = None
    o_bias_C: Tensor | None = None
    gate_bias_I: Tensor | None = None
    up_bias_I: Tensor | None = None
    down_bias_C: Tensor | None = None
    attention_sink_logits_H: Tensor | None = None
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
    """Matrices of one dtype on one device; a tied head is the embedding itself."""

    embedding_VC: Matrix
    layers: tuple[Layer, ...]
    norm_C: Tensor
    head_VC: Matrix

    @property
    def attention_sink_logits_LH(self) -> Tensor | None:
        """The sink logits of all layers, float32 (L, H), if the family has any."""
        logits_by_layer = [
            layer.attention_sink_logits_H for layer in self.layers if layer.attention_sink_logits_H is not None
        ]
        return torch.stack(logits_by_layer) if logits_by_layer else None

    def tensors(self) -> Iterator[Matrix]:
        """Every weight once, in a fixed order."""
        yield self.embedding_VC
        for layer in self.layers:
            yield from layer.weights()
        yield self.norm_C
        if self.head_VC is not self.embedding_VC:
            yield self.head_VC

    def multiplied(self) -> Iterator[Matrix]:
        """Every matrix that products read, without routers, which are never packed."""
        yield self.head_VC
        for layer in self.layers:
            yield from (part for part in layer.weights() if len(part.shape) == 2 and part is not layer.router_EC)

    @property
    def has_numbers(self) -> bool:
        """Whether a matrix that products read holds numbers, which kernels can round to fewer bits."""
        return any(isinstance(weight, Tensor) or weight.kind in PLAIN for weight in self.multiplied())
