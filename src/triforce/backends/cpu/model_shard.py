"""One rank's part of a decoder on the native kernels: its outputs have the bits that `NativeModel` gives them.

Each output is one chain of additions over what the ranks gather. Router and norms are whole on each rank, so that all
choose the same experts, and of every expert each has a part.

Shape suffixes as in kernel_api.py; Q = H * D, I MLP size, M rows of all experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.backends.cpu.model import EmbeddingAndHead, experts, packed, project
from triforce.distributed.group import TPGroup, span
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, Weights


class NativeModelShard(EmbeddingAndHead):
    """`config` has this rank's heads."""

    def __init__(self, config: ModelConfig, weights: Weights, bits: int = 0) -> None:
        super().__init__(config, weights, bits)
        self.blocks = packed(NativeLayerShard, config, weights, bits)


class NativeLayerShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        self.config, parts, eps = config, config.architecture, config.norm_eps
        q_norm, k_norm = (None, None) if parts.qk_norm == "row" else (layer.q_norm_D, layer.k_norm_D)
        self._query_scale = parts.query_scale if parts.qk_norm == "row" else 1.0
        """What is left to be done behind norms of whole rows."""
        self._projections = _native.QkvProjections(
            layer.input_norm_C, layer.q_proj_QC, layer.k_proj_PC, layer.v_proj_PC, layer.q_bias_Q, layer.k_bias_P,
            layer.v_bias_P, q_norm, k_norm, head_dim=config.head_dim, eps=eps, bits=bits,
            query_scale=parts.query_scale / self._query_scale,
        )  # fmt: skip
        whole = layer.q_norm_D, layer.k_norm_D, layer.attn_out_norm_C, layer.mlp_out_norm_C
        self._q_norm, self._k_norm, self._attn_out_norm, self._mlp_out_norm = (
            None if each is None else _native.Norm(each, eps=eps) for each in whole
        )
        self._out = Product(layer.o_proj_CQ, layer.o_bias_C, bits)
        self._mlp = ExpertsShard(config, layer, bits) if layer.experts else MlpShard(config, layer, bits)

    def qkv(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, ...]:
        q_NHD, k_NGD, v_NGD = project(self._projections, self.config, x_NC)
        if self._q_norm and self._k_norm and self.config.architecture.qk_norm == "row":
            q_NHD, k_NGD = _of_rows(q_NHD, self._q_norm, ranks), _of_rows(k_NGD, self._k_norm, ranks)
        return q_NHD.mul_(self._query_scale), k_NGD, v_NGD

    def finish(self, x_NC: Tensor, attn_out_NQ: Tensor, ranks: TPGroup) -> int:
        self._add(x_NC, self._out(ranks.inputs(attn_out_NQ, self._out.inputs)), self._attn_out_norm, ranks)
        part_NC, touched = self._mlp(x_NC, ranks)
        self._add(x_NC, part_NC, self._mlp_out_norm, ranks)
        return touched

    def _add(self, x_NC: Tensor, part_NC: Tensor, norm: _native.Norm | None, ranks: TPGroup) -> None:
        """Add to the residual stream what all ranks give: rounded as in one process, where products are rounded."""
        part_NC = ranks.outputs(part_NC, x_NC.shape[1])
        if norm:
            norm.forward(part_NC)
        x_NC += part_NC.mul_(self.config.architecture.residual_scale)


class Product:
    """Some outputs of a matrix, with their biases; of all inputs, or of some."""

    def __init__(self, weight: Matrix, bias: Tensor | None, bits: int) -> None:
        (self._outputs, self.inputs), self._dtype = weight.shape, weight.dtype
        self._native, self._bias = _native.Matrix(weight, bits=bits), None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self._outputs)
        self._native.linear(x.to(self._dtype).contiguous(), y)
        return y if self._bias is None else y.add_(self._bias)


class MlpShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        gate_IC, up_IC, down_CI = layer.gate_proj_IC, layer.up_proj_IC, layer.down_proj_CI
        assert gate_IC is not None and up_IC is not None and down_CI is not None
        self._gate = _native.GatedMlp(
            layer.post_norm_C, gate_IC, up_IC, layer.gate_bias_I, layer.up_bias_I, eps=config.norm_eps, bits=bits,
            activation=config.architecture.activation,
        )  # fmt: skip
        self._gated, self._dtype, self._down = len(gate_IC), gate_IC.dtype, Product(down_CI, layer.down_bias_C, bits)

    def __call__(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, int]:
        """Return (N, some of C), and that no experts were touched."""
        gated_NI = torch.empty(len(x_NC), self._gate.stride, dtype=self._dtype)
        self._gate.forward(x_NC, gated_NI)
        return self._down(ranks.inputs(gated_NI[:, : self._gated], self._down.inputs)), 0


class ExpertsShard:
    def __init__(self, config: ModelConfig, layer: Layer, bits: int) -> None:
        parts, first = config.architecture.experts, layer.experts[0]
        assert parts is not None
        self._native, self._per_row = experts(config, layer, bits), parts.read
        self._gated, self._dtype = len(first.gate_proj_IC), first.gate_proj_IC.dtype
        self._outputs, self._inputs = first.down_proj_CI.shape

    def __call__(self, x_NC: Tensor, ranks: TPGroup) -> tuple[Tensor, int]:
        """Return (N, some of C), and how many experts were touched: all of them at once, so ranks talk as of an MLP."""
        gated_MI = torch.empty(len(x_NC) * self._per_row, self._native.stride, dtype=self._dtype)
        choices = self._native.gate(x_NC, gated_MI)
        read_MI = ranks.inputs(gated_MI[:, : self._gated], self._inputs)
        sum_NC = torch.empty(len(x_NC), self._outputs)
        self._native.down(choices, F.pad(read_MI, (0, -self._inputs % 16)).contiguous(), sum_NC)
        return sum_NC, choices.touched


def _of_rows(x_NHD: Tensor, norm: _native.Norm, ranks: TPGroup) -> Tensor:
    """Norm the rows of all ranks' heads, (N, H, D) of this one's."""
    some_NQ = x_NHD.flatten(1)
    whole_NQ = ranks.gather(some_NQ, some_NQ.shape[1] * ranks.count)
    norm.forward(whole_NQ)
    return whole_NQ[:, span(whole_NQ.shape[1], ranks)].contiguous().view(x_NHD.shape)
