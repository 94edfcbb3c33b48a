"""The weights of a model, as plain tensors.

Shape suffixes: V vocabulary, C hidden size, I MLP size, D head size, Q = query heads * D, P = KV heads * D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one block; `None` where the family has none."""

    input_norm_C: Tensor
    q_proj_QC: Tensor
    k_proj_PC: Tensor
    v_proj_PC: Tensor
    o_proj_CQ: Tensor
    post_norm_C: Tensor
    gate_proj_IC: Tensor
    up_proj_IC: Tensor
    down_proj_CI: Tensor
    q_bias_Q: Tensor | None = None
    k_bias_P: Tensor | None = None
    v_bias_P: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Tensors of one dtype on one device; a tied head is the embedding itself."""

    embedding_VC: Tensor
    layers: tuple[Layer, ...]
    norm_C: Tensor
    head_VC: Tensor

    def tensors(self) -> Iterator[Tensor]:
        """Every weight once, in a fixed order."""
        yield self.embedding_VC
        for layer in self.layers:
            yield from (tensor for f in fields(layer) if (tensor := getattr(layer, f.name)) is not None)
        yield self.norm_C
        if self.head_VC is not self.embedding_VC:
            yield self.head_VC
