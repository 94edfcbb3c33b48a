"""A feature draft's layer, packed for the native kernels: a row's bits depend on that row alone.

Shape suffixes as in model/feature_draft.py; B rows, N queries.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.torch.feature_layer import FeatureLayer
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights

MATRICES = (
    "fc_CX", "q_proj_QE", "k_proj_PE", "v_proj_PE", "o_proj_CQ", "gate_proj_IC", "up_proj_IC", "down_proj_CI",
    "embedding_proj_CC", "head_MC",
)  # fmt: skip
"""Fields that are packed; the others are vectors."""


class NativeFeatureLayer(FeatureLayer):
    """The residual stream is float32, and products have inputs of the given type."""

    def __init__(self, config: FeatureDraftConfig, weights: FeatureDraftWeights, dtype: torch.dtype) -> None:
        named = {field.name: getattr(weights, field.name) for field in fields(weights)}
        matrices = {name: weight.to(dtype) for name, weight in named.items() if name in MATRICES and weight is not None}
        gate_IC, up_IC = matrices.pop("gate_proj_IC"), matrices.pop("up_proj_IC")
        super().__init__(config, replace(weights, **dict.fromkeys(MATRICES, torch.empty(0))))
        self.dtype = dtype
        self._packed = {name: (_native.Matrix(weight), len(weight)) for name, weight in matrices.items()}
        self._mlp = _native.GatedMlp(weights.post_norm_C, gate_IC, up_IC, eps=config.norm_eps)

    def times(self, weight: str, x: Tensor) -> Tensor:
        matrix, outputs = self._packed[weight]
        y = torch.empty(*x.shape[:-1], outputs)
        matrix.linear(x.flatten(0, -2).to(self.dtype).contiguous(), y.view(-1, outputs))
        return y

    def _gated(self, x_BNC: Tensor) -> Tensor:
        gated = torch.empty(x_BNC[..., 0].numel(), self._mlp.stride, dtype=self.dtype)
        self._mlp.forward(x_BNC.flatten(0, -2).contiguous(), gated)
        return gated[:, : self.config.intermediate_size].view(*x_BNC.shape[:-1], -1)
