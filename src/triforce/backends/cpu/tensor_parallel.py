"""One rank's part of a decoder's weights, packed for the native kernels: the bits of each output are `NativeModel`'s.

Shape suffixes as in kernel_api.py; Q = H * D, I MLP size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.model import EmbeddingAndHead, project
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Weights


class NativeModelShard(EmbeddingAndHead):
    """`config` has this rank's heads."""

    def __init__(self, config: ModelConfig, weights: Weights, int8: bool = False) -> None:
        super().__init__(config, weights, int8)
        self.blocks = [NativeLayerShard(config, layer, int8) for layer in weights.layers]


class NativeLayerShard:
    def __init__(self, config: ModelConfig, layer: Layer, int8: bool) -> None:
        self.config, self.dtype, self._mlp = config, layer.o_proj_CQ.dtype, len(layer.gate_proj_IC)
        self._projections = _native.QkvProjections(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.q_bias_Q, layer.k_bias_P,
            layer.v_bias_P, layer.q_norm_D, layer.k_norm_D, head_dim=config.head_dim, eps=config.norm_eps, int8=int8,
        )  # fmt: skip
        norm_C, gate_IC, up_IC = layer.post_norm_C, layer.gate_proj_IC, layer.up_proj_IC
        self._gate = _native.GatedMlp(norm_C, gate_IC, up_IC, eps=config.norm_eps, int8=int8)
        self._out, self._down = (
            (_native.Matrix(each, int8=int8), len(each)) for each in (layer.o_proj_CQ, layer.down_proj_CI)
        )

    def qkv(self, x_NC: Tensor) -> tuple[Tensor, ...]:
        return project(self._projections, self.config, x_NC)

    def out(self, attn_out_NQ: Tensor) -> Tensor:
        return self._times(*self._out, attn_out_NQ)

    def gate(self, x_NC: Tensor) -> Tensor:
        gated = torch.empty(len(x_NC), self._gate.stride, dtype=self.dtype)
        self._gate.forward(x_NC, gated)
        return gated[:, : self._mlp]

    def down(self, gated_NI: Tensor) -> Tensor:
        return self._times(*self._down, gated_NI)

    def _times(self, matrix: _native.Matrix, outputs: int, x: Tensor) -> Tensor:
        y = torch.empty(len(x), outputs)
        matrix.linear(x.to(self.dtype).contiguous(), y)
        return y
